// SPDX-License-Identifier: Apache-2.0
// The rows of a block that MLA gathers: those of the tiles that the rank attends to, from its own shard and from the
// block buffer, packed. Expanded rows and rows [c, k_r] have this order. Each row is gathered once.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/ring/plan.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn {

// Rows [row, row + rows) of source kOwnShard or kBlockBuffer are copied to the gathered rows from `to` on.
struct GatheredRun {
  std::int32_t source = kOwnShard;
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t to = 0;

  bool operator==(const GatheredRun&) const = default;
};

struct GatheredBlock {
  std::vector<GatheredRun> runs;  // as few as possible, ascending by source and row
  std::vector<PageRun> tiles;     // of the block's task, in the gathered rows: source 0
  std::int64_t rows = 0;
};

// `plan` is the plan of the block.
GatheredBlock gather_block(const Plan& plan, const BlockPlan& block);

}  // namespace ringattn
