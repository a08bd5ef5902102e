// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/gathered_blocks.hpp"

#include "ops/attention/block_tiles.hpp"

namespace ringattn {

GatheredBlock gather_block(const Plan& plan, const BlockPlan& block) {
  GatheredBlock gathered;
  gathered.tiles.resize(block.tiles.size());
  for (const BlockTile& tile : tiles_by_address(plan, block)) {
    gathered.tiles[tile.entry] = {0, gathered.rows};
    const bool goes_on = !gathered.runs.empty() && gathered.runs.back().source == tile.from.source &&
                         gathered.runs.back().row + gathered.runs.back().rows == tile.from.row;
    if (goes_on) {
      gathered.runs.back().rows += tile.rows;
    } else {
      gathered.runs.push_back({tile.from.source, tile.from.row, tile.rows, gathered.rows});
    }
    gathered.rows += tile.rows;
  }
  return gathered;
}

}  // namespace ringattn
