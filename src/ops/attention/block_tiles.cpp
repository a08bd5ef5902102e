// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/block_tiles.hpp"

#include <algorithm>
#include <tuple>

namespace ringattn {

std::vector<BlockTile> tiles_by_address(const Plan& plan, const BlockPlan& block) {
  const std::int64_t key_tile = plan.kernel.key_tile;
  std::vector<BlockTile> tiles;
  for (const KeyRun& run : block.key_runs) {
    const std::int64_t keys = plan.key_lengths[static_cast<std::size_t>(run.sequence)];
    for (std::int64_t t = 0; t < run.tiles; ++t) {
      const auto entry = static_cast<std::size_t>(run.table + t);
      const std::int64_t position = (run.first_tile + t) * key_tile;
      tiles.push_back({block.tiles[entry], run.sequence, position, keys, std::min(key_tile, keys - position), entry});
    }
  }
  std::ranges::sort(tiles, [](const BlockTile& a, const BlockTile& b) {
    return std::tie(a.from.source, a.from.row) < std::tie(b.from.source, b.from.row);
  });
  return tiles;
}

}  // namespace ringattn
