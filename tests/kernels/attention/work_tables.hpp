// SPDX-License-Identifier: Apache-2.0
// Tasks on the host, the tables that WorkBuilder makes of them, and what its tests look at.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/work_tiles.hpp"
#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

inline constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {300, 0}, {40, 25}, {-1, 70}, {10, -1}};
inline constexpr cuda::WorkTileShape kShapes[] = {
    {128, 128, 64, 1, 1 << 30}, {64, 64, 128, 1, 100'000}, {16, 1, 128, 1, 1 << 20}, {64, 64, 80, 2, 1 << 20, 132}};
inline constexpr cuda::WorkTileShape kPackedTileShapes[] = {
    {64, 64, 128, 3, 1 << 20, 132}, {64, 64, 80, 2, std::int64_t{1} << 40, 7}, {64, 64, 80, 2, 1 << 20, 132, 2}};

struct HostTask {
  std::vector<QueryRun> queries;
  std::vector<std::int64_t> key_lengths;
  std::vector<KeyRun> key_runs;
  std::vector<PageRun> tiles;
  std::vector<KeySource> sources;
  std::int64_t rows = 0;
  AttentionTask task;

  void add_sequence(std::int64_t key_length) { key_lengths.push_back(key_length); }
  void add_queries(std::int64_t position, std::int64_t count) {
    queries.push_back({sequence(), position, rows, count});
    rows += count;
  }
  void add_keys(std::int64_t first_tile, std::int64_t count) {
    key_runs.push_back({sequence(), first_tile, count, static_cast<std::int64_t>(tiles.size())});
    for (std::int64_t i = 0; i < count; ++i) tiles.push_back({0, 100'000 * sequence() + first_tile + i});
  }
  void finish() {
    sources.resize(1);
    task.q.tokens = rows;
    task.queries = queries;
    task.key_lengths = key_lengths;
    task.key_runs = key_runs;
    task.tiles = tiles;
    task.sources = sources;
  }
  std::int32_t sequence() const { return static_cast<std::int32_t>(key_lengths.size()) - 1; }
};

// Sequences with random runs of queries and of key tiles, some without either.
inline HostTask random_task(const cuda::WorkTileShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  HostTask t;
  const std::int64_t sequences = 1 + below(5);
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t length = below(4) == 0 ? below(3) : below(3000);
    t.add_sequence(length);
    std::int64_t position = below(500) - 200;
    for (std::int64_t runs = below(6); runs > 0; --runs) {
      const std::int64_t rows = 1 + below(400);
      t.add_queries(position, rows);
      position += rows + below(3) * 57;
    }
    const std::int64_t tiles = (length + shape.key_tile - 1) / shape.key_tile;
    for (std::int64_t tile = below(3); tile < tiles;) {
      const std::int64_t count = std::min(1 + below(7), tiles - tile);
      t.add_keys(tile, count);
      tile += count + below(4);
    }
  }
  t.finish();
  return t;
}

// Causal sequences as they come in a batch: long ones, one of one token, one of none, one without keys, one with a
// prefix of its keys elsewhere. Every fourth tile is missing.
inline HostTask ragged_task(const cuda::WorkTileShape& shape) {
  HostTask t;
  for (const auto& [queries, keys] :
       {std::pair<std::int64_t, std::int64_t>{1500, 1500}, {1, 1}, {0, 0}, {70, 0}, {333, 2000}, {1, 900}}) {
    t.add_sequence(keys);
    if (queries > 0) t.add_queries(keys - queries, queries);
    const std::int64_t tiles = (keys + shape.key_tile - 1) / shape.key_tile;
    for (std::int64_t tile = 0; tile < tiles; tile += 4) t.add_keys(tile, std::min<std::int64_t>(3, tiles - tile));
  }
  t.finish();
  return t;
}

// Sequences of `tokens` queries and as many keys, all of them in the task.
inline HostTask whole_task(const cuda::WorkTileShape& shape, int sequences, std::int64_t tokens) {
  HostTask t;
  for (int s = 0; s < sequences; ++s) {
    t.add_sequence(tokens);
    t.add_queries(0, tokens);
    t.add_keys(0, (tokens + shape.key_tile - 1) / shape.key_tile);
  }
  t.finish();
  return t;
}

struct Built {
  std::vector<std::byte> memory;
  cuda::TableLayout layout;

  template <typename Entry>
  const Entry* at(std::size_t offset) const {
    return reinterpret_cast<const Entry*>(memory.data() + offset);
  }
};

inline AttentionLimits limits_of(const AttentionTask& task) {
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  return {task.q.tokens,     count(task.queries), count(task.key_runs),
          count(task.tiles), count(task.sources), count(task.key_lengths)};
}

inline Built build(const AttentionSpec& spec, const AttentionTask& task, const cuda::WorkTileShape& shape) {
  Built built;
  built.memory.assign(cuda::table_bytes(spec, shape, limits_of(task)), std::byte{0xff});
  cuda::WorkBuilder builder;
  builder.reserve(spec, shape, limits_of(task));
  built.layout = builder.build(spec, task, shape, built.memory);
  return built;
}

// The rows of the tile map (100'000 · sequence + tile) of a work tile or a GQA-packed tile.
template <typename Work>
std::vector<std::int64_t> walk(const Built& built, const Work& work_tile) {
  std::vector<std::int64_t> tiles;
  for (std::int64_t number = work_tile.first; number < work_tile.first + work_tile.tiles; ++number) {
    const auto* runs = built.at<cuda::RunEntry>(built.layout.runs) + work_tile.run_begin;
    int run = 0;
    while (run + 1 < work_tile.runs && runs[run + 1].first <= number) ++run;
    const std::int64_t index = number - runs[run].first;
    const std::int64_t row = built.at<cuda::TileEntry>(built.layout.tiles)[runs[run].table + index].row;
    EXPECT_EQ(row % 100'000, runs[run].first_tile + index);
    if (work_tile.runs == 1) {  // as in the work tile itself
      EXPECT_EQ(runs[run].table + index, work_tile.table + number - work_tile.first);
      EXPECT_EQ(runs[run].first_tile + index, work_tile.first_tile + number - work_tile.first);
    }
    tiles.push_back(row);
  }
  return tiles;
}

// Work in L2 swizzle groups comes longest first in each; then what is left for last, longest first too, shorter than
// all before and none longer than a quarter of the longest. `swizzle_group_of` the n-th piece.
template <typename Work>
void expect_order(const Built& built, std::span<const Work> pieces,
                  const std::function<int(std::size_t)>& swizzle_group_of) {
  const auto early = static_cast<std::size_t>(built.layout.early_entries);
  ASSERT_LE(early, pieces.size());
  const auto by_tiles = [](const Work& a, const Work& b) { return a.tiles < b.tiles; };
  const auto most = std::max_element(pieces.begin(), pieces.end(), by_tiles)->tiles;
  for (std::size_t i = 0; i + 1 < pieces.size(); ++i) {
    const bool new_section = i + 1 < early && swizzle_group_of(i) != swizzle_group_of(i + 1);
    EXPECT_TRUE(new_section || pieces[i].tiles >= pieces[i + 1].tiles) << i;
    EXPECT_TRUE(!new_section || swizzle_group_of(i) < swizzle_group_of(i + 1)) << i;
  }
  for (std::size_t i = 0; i < early; ++i) {
    EXPECT_TRUE(early == pieces.size() || pieces[i].tiles > pieces[early].tiles) << i;
  }
  for (std::size_t i = early; i < pieces.size(); ++i) EXPECT_LE(pieces[i].tiles, most / 4) << i;
}

// Calls visit(work_tile, query head, gqa_tile, the gqa_tile's first query head) for every head work tile, in the order
// of the CTAs; gqa_tile is null where there are none.
template <class Visit>
void visit_work_tiles(const Built& built, const cuda::WorkTileShape& shape, Visit visit) {
  const cuda::TableLayout& layout = built.layout;
  const auto* work_tiles = built.at<cuda::WorkTile>(layout.work_tiles);
  const int pieces = shape.head_tiles == 1 ? layout.work_tile_count : layout.gqa_tile_count;
  for (int index = 0; index < pieces * layout.entry_heads; ++index) {
    const cuda::WorkIndex work_index =
        cuda::work_index(layout.early_entries, layout.entry_heads, layout.swizzle_heads, index);
    ASSERT_LT(work_index.entry, pieces);
    if (shape.head_tiles == 1) {
      const cuda::WorkTile& work_tile = work_tiles[work_index.entry];
      visit(work_tile, work_tile.head + work_index.head, static_cast<const cuda::GqaPackedTile*>(nullptr),
            work_tile.head + work_index.head);
      continue;
    }
    const cuda::GqaPackedTile& gqa_tile = built.at<cuda::GqaPackedTile>(layout.gqa_tiles)[work_index.entry];
    const int query_head = work_tiles[gqa_tile.work_tile].head + work_index.head * layout.heads_per_gqa_tile;
    for (int nth = gqa_tile.head; nth < gqa_tile.head + gqa_tile.head_tiles; ++nth) {
      const cuda::WorkTile& work_tile = work_tiles[gqa_tile.work_tile + nth / layout.heads_per_gqa_tile];
      visit(work_tile, query_head + nth % layout.heads_per_gqa_tile, &gqa_tile, query_head);
    }
  }
}

}  // namespace ringattn::testing
