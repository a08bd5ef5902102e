// SPDX-License-Identifier: Apache-2.0
// Which rows of a block latent attention gathers, and where: those of the tiles that the rank folds, side by side, the
// rank's own and those that have arrived. What is expanded or put together lies like that, once for each row.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/ring/plan.hpp"
#include "kernels/attention.hpp"

namespace ringattn {

// Rows [row, row + rows) of kOwnShard or kBlockBuffer become the gathered rows from `to` on.
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

// `plan`: whose block it is.
GatheredBlock gather_block(const Plan& plan, const BlockPlan& block);

}  // namespace ringattn
