// SPDX-License-Identifier: Apache-2.0
// The tables that CUDA fold kernels read, checked on the host: every row of a task once, with exactly the tiles that it
// folds, in order; the longest items first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "kernels/cuda/work_items.hpp"
#include "tests/support/fold_inputs.hpp"

namespace ringattn::cuda {
namespace {

constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {300, 0}, {40, 25}, {-1, 70}, {10, -1}};
constexpr WorkShape kShapes[] = {{128, 128, 64, 1, 1 << 30}, {64, 64, 128, 1, 100'000}, {16, 1, 128, 1, 1 << 20}};

struct RandomTask {
  std::vector<QueryRun> queries;
  std::vector<std::int64_t> key_lengths;
  std::vector<KeyRun> key_runs;
  std::vector<KeyTile> tiles;
  std::vector<KeySource> sources;
  FoldTask task;
};

// Sequences with random runs of queries and of key tiles, some without either.
RandomTask random_task(const WorkShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  RandomTask t;
  std::int64_t row = 0;
  const auto sequences = static_cast<std::int32_t>(1 + below(5));
  for (std::int32_t s = 0; s < sequences; ++s) {
    const std::int64_t length = below(4) == 0 ? below(3) : below(3000);
    t.key_lengths.push_back(length);
    std::int64_t position = below(500) - 200;
    for (std::int64_t runs = below(6); runs > 0; --runs) {
      const std::int64_t rows = 1 + below(400);
      t.queries.push_back({s, position, row, rows});
      row += rows;
      position += rows + below(3) * 57;
    }
    const std::int64_t tiles = (length + shape.key_tile - 1) / shape.key_tile;
    for (std::int64_t tile = below(3); tile < tiles;) {
      const std::int64_t count = std::min(1 + below(7), tiles - tile);
      t.key_runs.push_back({s, tile, count, static_cast<std::int64_t>(t.tiles.size())});
      for (std::int64_t i = 0; i < count; ++i) t.tiles.push_back({0, 100'000 * s + tile + i});
      tile += count + below(4);
    }
  }
  t.sources.resize(1);
  t.task.q.tokens = row;
  t.task.queries = t.queries;
  t.task.key_lengths = t.key_lengths;
  t.task.key_runs = t.key_runs;
  t.task.tiles = t.tiles;
  t.task.sources = t.sources;
  return t;
}

struct Built {
  std::vector<std::byte> memory;
  TableLayout layout;

  template <typename Entry>
  const Entry* at(std::size_t offset) const {
    return reinterpret_cast<const Entry*>(memory.data() + offset);
  }
};

FoldLimits limits_of(const FoldTask& task) {
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  return {task.q.tokens,     count(task.queries), count(task.key_runs),
          count(task.tiles), count(task.sources), count(task.key_lengths)};
}

Built build(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape) {
  Built built;
  built.memory.resize(table_bytes(spec, shape, limits_of(task)));
  WorkBuilder builder;
  builder.reserve(spec, shape, limits_of(task));
  built.layout = builder.build(spec, task, shape, built.memory);
  return built;
}

// The rows of the tile map (100'000 · sequence + tile) that an item walks over.
std::vector<std::int64_t> walk(const Built& built, const WorkItem& item) {
  std::vector<std::int64_t> tiles;
  for (std::int64_t number = item.first; number < item.first + item.tiles; ++number) {
    const auto* runs = built.at<RunEntry>(built.layout.runs) + item.run_begin;
    int run = 0;
    while (run + 1 < item.runs && runs[run + 1].first <= number) ++run;
    const std::int64_t index = number - runs[run].first;
    const std::int64_t row = built.at<TileEntry>(built.layout.tiles)[runs[run].table + index].row;
    EXPECT_EQ(row % 100'000, runs[run].first_tile + index);
    if (item.runs == 1) {  // what the item itself says
      EXPECT_EQ(runs[run].table + index, item.table + number - item.first);
      EXPECT_EQ(runs[run].first_tile + index, item.first_tile + number - item.first);
    }
    tiles.push_back(row);
  }
  return tiles;
}

TEST(WorkItems, EveryRowOnceWithItsTilesInOrder) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    for (const WorkShape& shape : kShapes) {
      const RandomTask random = random_task(shape, seed);
      FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, kMasks[seed % std::size(kMasks)]);
      const Built built = build(spec, random.task, shape);
      std::vector<int> visits(static_cast<std::size_t>(random.task.q.tokens), 0);
      for (std::int32_t i = 0; i < built.layout.item_count; ++i) {
        const WorkItem& item = built.at<WorkItem>(built.layout.items)[i];
        ASSERT_LE(item.slot_end, shape.item_rows);
        const std::vector<std::int64_t> tiles = walk(built, item);
        for (std::int64_t slot = item.slot_begin; slot < item.slot_end; ++slot) {
          const std::int64_t row = item.row + slot;
          ++visits[static_cast<std::size_t>(row)];
          const auto run = std::find_if(random.queries.begin(), random.queries.end(),
                                        [&](const QueryRun& q) { return q.row <= row && row < q.row + q.rows; });
          ASSERT_EQ(item.position + slot, run->position + row - run->row);
          const std::int64_t length = random.key_lengths[static_cast<std::size_t>(run->sequence)];
          ASSERT_EQ(item.key_length, length);
          const TileRange folded =
              folded_tiles(spec.mask, item.position + slot, length, shape.query_tile, shape.key_tile);
          std::vector<std::int64_t> expected;
          for (const KeyRun& keys : random.key_runs) {
            if (keys.sequence != run->sequence) continue;
            for (std::int64_t tile = keys.first_tile; tile < keys.first_tile + keys.tiles; ++tile) {
              if (folded.begin <= tile && tile < folded.end) expected.push_back(100'000 * keys.sequence + tile);
            }
          }
          if (shape.query_tile > 1) {
            ASSERT_EQ(tiles, expected) << "seed " << seed;
          } else {
            ASSERT_TRUE(std::includes(tiles.begin(), tiles.end(), expected.begin(), expected.end())) << "seed " << seed;
          }
        }
      }
      ASSERT_EQ(visits, std::vector<int>(visits.size(), 1)) << "seed " << seed;
    }
  }
}

TEST(WorkItems, RowsThatNothingHappensToAreLeftOut) {
  const WorkShape& shape = kShapes[0];
  const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  RandomTask random = random_task(shape, 3);
  random.task.resume = true;
  const Built built = build(spec, random.task, shape);
  for (std::int32_t i = 0; i < built.layout.item_count; ++i) {
    EXPECT_GT(built.at<WorkItem>(built.layout.items)[i].tiles, 0);
  }
  random.task.key_runs = {};
  EXPECT_EQ(build(spec, random.task, shape).layout.item_count, 0);
}

TEST(WorkItems, LongestFirst) {
  // One long causal sequence, then a batch whose sequences fill the cache one by one.
  for (const std::int64_t cache : {std::int64_t{1} << 40, std::int64_t{1}}) {
    WorkShape shape = kShapes[0];
    shape.cache_bytes = cache;
    const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
    std::vector<QueryRun> queries;
    std::vector<KeyRun> runs;
    std::vector<KeyTile> tiles;
    const std::vector<std::int64_t> lengths(3, 1024);
    for (std::int32_t s = 0; s < 3; ++s) {
      queries.push_back({s, 0, 1024 * s, 1024});
      runs.push_back({s, 0, 16, 16 * s});
      for (int i = 0; i < 16; ++i) tiles.push_back({0, 100'000 * s + i});
    }
    FoldTask task;
    task.q.tokens = 3 * 1024;
    task.queries = queries;
    task.key_lengths = lengths;
    task.key_runs = runs;
    task.tiles = tiles;
    const Built built = build(spec, task, shape);
    ASSERT_EQ(built.layout.item_count, 24);
    EXPECT_EQ(built.layout.section_heads, cache == 1 ? 4 : 8);
    const auto* items = built.at<WorkItem>(built.layout.items);
    for (std::int32_t i = 0; i + 1 < 24; ++i) {
      const bool new_section = cache == 1 && (i + 1) % 8 == 0;
      EXPECT_TRUE(new_section || items[i].tiles >= items[i + 1].tiles) << i;
      EXPECT_TRUE(cache != 1 || items[i].run_begin == i / 8) << i;
    }
  }
}

TEST(WorkItems, RefusesMoreThanWasReserved) {
  const WorkShape& shape = kShapes[0];
  const RandomTask random = random_task(shape, 5);
  const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  std::vector<std::byte> memory(64);
  WorkBuilder builder;
  EXPECT_THROW(builder.build(spec, random.task, shape, memory), Error);
}

}  // namespace
}  // namespace ringattn::cuda
