// SPDX-License-Identifier: Apache-2.0
// Where `bench` writes its measurements: the points as --output says, and the report of --json.
#pragma once

#include <optional>
#include <span>

#include "launch/bench_table.hpp"
#include "launch/commands.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// Throws kUsage if several flags write to stdout.
void check_one_stdout(const Config& config);

// Writes the points as --output says. With jsonl the lines are already on stdout, so the table goes to stderr.
void write_table(const Screen& screen, const JobOptions& options, const Table& table);

// `sgemm`: operations per second. `code`: the exit code.
void write_bench_report(const Invocation& invocation, std::span<const BenchPoint> points,
                        std::span<const PointPair> pairs, std::optional<double> sgemm, int code);

}  // namespace ringattn
