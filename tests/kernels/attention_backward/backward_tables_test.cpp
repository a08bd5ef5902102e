// SPDX-License-Identifier: Apache-2.0
// Tables of the CUDA kernels of attention backward; built on the host.
#include "kernels/attention_backward/cuda/backward_tables.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/attention_spec.hpp"

namespace ringattn::cuda {
namespace {

// The work of rows grows with the window and not with the sequence, for dQ as for dK and dV.
TEST(BackwardTables, WindowsBoundTheTilesOfRows) {
  constexpr std::int64_t kTokens = 1 << 15;
  constexpr std::int64_t kWindow = 1024;
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, {kWindow - 1, 0});
  const BackwardSequence sequences[] = {{kTokens, kTokens, 0}};
  const QueryRun rows[] = {{.sequence = 0, .position = 0, .row = 0, .rows = kTokens}};
  for (const BackwardSide side : {BackwardSide::kQueries, BackwardSide::kKeys}) {
    const bool of_queries = side == BackwardSide::kQueries;
    const int tile = of_queries ? 128 : kBackwardTile;
    const int group = of_queries ? 2 : 1;
    const std::int64_t count = kTokens / tile;
    const KeyRun runs[] = {{.sequence = 0, .first_tile = 0, .tiles = count, .table = 0}};
    std::vector<PageRun> tiles;
    for (std::int64_t i = 0; i < count; ++i) tiles.push_back({.source = 0, .row = i * tile});
    BackwardTask task;
    task.sequences = sequences;
    task.rows = rows;
    task.runs = runs;
    task.tiles = tiles;
    const BackwardLimits limits{.rows = kTokens, .row_runs = 1, .tile_runs = 1, .tiles = count, .sequences = 1};
    const BackwardShape shape{side, tile, kBackwardKvSplit, group, kRowTilesOfPair, 1 << 20, 1};
    BackwardTableBuilder builder;
    builder.reserve(limits, group);
    std::vector<std::byte> memory(backward_table_bytes(limits, group));
    const TileRows sources[] = {{}};
    const BackwardTableLayout layout = builder.build(spec, task, shape, true, {sources, {}, true}, memory);
    ASSERT_GE(layout.pair_count, kTokens / kBackwardTile / kRowTilesOfPair);
    const std::int64_t most = (kWindow + kRowTilesOfPair * kBackwardTile) / tile + 1;
    const auto* const pairs = reinterpret_cast<const RowTilePair*>(memory.data() + layout.pairs);
    for (const RowTilePair& pair : std::span(pairs, static_cast<std::size_t>(layout.pair_count))) {
      ASSERT_GT(pair.tiles, 0);
      ASSERT_LE(pair.tiles, most);
      ASSERT_LE(pair.end_tile - pair.begin_tile, most);
    }
  }
}

}  // namespace
}  // namespace ringattn::cuda
