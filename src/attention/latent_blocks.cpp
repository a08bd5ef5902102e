// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_blocks.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>

namespace ringattn {

namespace {

struct Tile {
  KeyTile from;
  std::int64_t rows = 0;
  std::size_t entry = 0;  // of the map
};

std::vector<Tile> tiles_of(const Plan& plan, const BlockPlan& block) {
  const std::int64_t key_tile = plan.kernel.key_tile;
  std::vector<Tile> tiles;
  for (const KeyRun& run : block.key_runs) {
    const std::int64_t keys = plan.key_lengths[static_cast<std::size_t>(run.sequence)];
    for (std::int64_t t = 0; t < run.tiles; ++t) {
      const auto entry = static_cast<std::size_t>(run.table + t);
      tiles.push_back({block.tiles[entry], std::min(key_tile, keys - (run.first_tile + t) * key_tile), entry});
    }
  }
  return tiles;
}

}  // namespace

GatheredBlock gather_block(const Plan& plan, const BlockPlan& block) {
  std::vector<Tile> tiles = tiles_of(plan, block);
  // Tiles that follow each other in a shard are far from each other in the sequence, where stripes are dealt in turn.
  std::ranges::sort(tiles, [](const Tile& a, const Tile& b) {
    return std::tie(a.from.source, a.from.row) < std::tie(b.from.source, b.from.row);
  });
  GatheredBlock gathered;
  gathered.tiles.resize(block.tiles.size());
  for (const Tile& tile : tiles) {
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
