// SPDX-License-Identifier: Apache-2.0
// Which flags of a job belong to an op.
#pragma once

#include <string>
#include <string_view>

#include "launch/config.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

inline bool belongs_to(const FlagRow& row, const OpEntry& op) { return row.of_all_ops || op.takes(row.name); }

// The name of the op of that name, an older name included. Throws BadValue with all names.
std::string parse_op(std::string_view text);

// Names the op that computes the gradients of --op, where they are asked for. Throws kUsage for an op without
// gradients.
void fill_backward_op(Config& config);

// Where a bench job's few queries would be measured as decode steps although nobody named the op: names it.
void fill_bench_op(Config& config);

// Throws kUsage for a flag that the user chose and that does not belong to the op of synthetic input.
void check_op(const Config& config);
// The same for the op of an open job.
void check_op(const Config& config, const OpJob& job);

}  // namespace ringattn
