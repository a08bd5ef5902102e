// SPDX-License-Identifier: Apache-2.0
// Which of a job's flags belong to an op.
#pragma once

#include <string>
#include <string_view>

#include "launch/config.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

inline bool belongs_to(const FlagRow& row, const OpEntry& op) { return row.of_all_ops || op.takes(row.name); }

// Returns the current name of an op, given that name or an older one. Throws BadValue with all names.
std::string parse_op(std::string_view text);

// If gradients of --op are requested, sets the op to the one that computes them. Throws kUsage for an op without
// gradients.
void fill_backward_op(Config& config);

// If no op was named and a bench job has so few queries that it would be measured as decode steps, names the decode op.
void fill_bench_op(Config& config);

// Throws kUsage for a flag that the user chose and that does not belong to the op of synthetic input.
void check_op(const Config& config);
// The same for the op of an open job.
void check_op(const Config& config, const OpJob& job);

}  // namespace ringattn
