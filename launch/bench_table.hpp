// SPDX-License-Identifier: Apache-2.0
// Points of a benchmark as tables for people: without comparison, next to other lines, or against a baseline.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch/bench_points.hpp"

namespace ringattn {

// Two points that were measured at the same job on as many ranks.
struct PointPair {
  BenchPoint ours;
  BenchPoint theirs;

  // Ours over theirs: above 1 is faster than they are.
  double speed() const { return theirs.tflops_per_rank > 0.0 ? ours.tflops_per_rank / theirs.tflops_per_rank : 0.0; }
};

// Each of `ours` beside each of `theirs` that is comparable; of lines by the same program, kernel and transport the
// last one counts. Points without figures are left out.
std::vector<PointPair> pair_points(std::span<const BenchPoint> ours, std::span<const BenchPoint> theirs);

// Each of `ours` beside the last line of `baseline` that measured the same in the same way.
std::vector<PointPair> pair_with_baseline(std::span<const BenchPoint> ours, std::span<const BenchPoint> baseline);

// The figures. `sgemm`: operations per second of a matrix product, for a column with the ratio.
std::string points_text(std::span<const BenchPoint> points, std::optional<double> sgemm, bool with_header);
std::string pairs_text(std::span<const PointPair> pairs);

// "8192 tokens, 2 sequences, bf16 32/8 x 128 causal"
std::string label(const BenchJob& job);

}  // namespace ringattn
