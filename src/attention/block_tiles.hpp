// SPDX-License-Identifier: Apache-2.0
// The key tiles of a block, for steps that make rows of their own of what has arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/ring/plan.hpp"

namespace ringattn {

struct BlockTile {
  PageRun from;
  std::int32_t sequence = 0;
  std::int64_t position = 0;  // in its sequence, of the first key
  std::int64_t keys = 0;      // of the sequence
  std::int64_t rows = 0;
  std::size_t entry = 0;  // of BlockPlan::tiles
};

// In the order in which they lie in memory: tiles that follow each other in a shard are far from each other in the
// sequence, where stripes are dealt in turn. `plan`: whose block it is.
std::vector<BlockTile> tiles_by_address(const Plan& plan, const BlockPlan& block);

}  // namespace ringattn
