// SPDX-License-Identifier: Apache-2.0
// Tables of benchmark points, by themselves or compared with another program's points or with a baseline.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch/bench_points.hpp"
#include "launch/table.hpp"

namespace ringattn {

// Two measurements of the same job on the same number of ranks.
struct PointPair {
  BenchPoint ours;
  BenchPoint theirs;

  // Our rate over theirs: above 1 means that ours is faster.
  double speed() const { return theirs.tflops_per_rank > 0.0 ? ours.tflops_per_rank / theirs.tflops_per_rank : 0.0; }
};

// Pairs each point of `ours` with the comparable points of `theirs`: the last one of each program, kernel and
// transport. Points without measurements are left out.
std::vector<PointPair> pair_points(std::span<const BenchPoint> ours, std::span<const BenchPoint> theirs);

// Pairs each point of `ours` with the last point of `baseline` for the same job, program, kernel and options.
std::vector<PointPair> pair_with_baseline(std::span<const BenchPoint> ours, std::span<const BenchPoint> baseline);

// The table of points. If `sgemm` (operations per second of a matrix product) is given, a column has the rate as a
// percentage of it.
Table points_table(std::span<const BenchPoint> points, std::optional<double> sgemm);
std::string pairs_text(std::span<const PointPair> pairs);

}  // namespace ringattn
