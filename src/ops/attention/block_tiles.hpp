// SPDX-License-Identifier: Apache-2.0
// Key tiles of a block, for ring steps that decompress or gather the received rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/ring/plan.hpp"

namespace ringattn {

struct BlockTile {
  PageRun from;
  std::int32_t sequence = 0;
  std::int64_t position = 0;  // in its sequence, of the first key of the tile
  std::int64_t keys = 0;      // number of keys of the sequence
  std::int64_t rows = 0;
  std::size_t entry = 0;  // index into BlockPlan::tiles
};

// Tiles in the order of their addresses, which differs from sequence order with a striped layout. `plan` is the plan of
// the block.
std::vector<BlockTile> tiles_by_address(const Plan& plan, const BlockPlan& block);

}  // namespace ringattn
