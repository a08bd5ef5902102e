// SPDX-License-Identifier: Apache-2.0
// The tables that CUDA attention kernels read, checked on the host: every row of a task once, with exactly the tiles
// that it uses, in order; the longest first; and which tasks have the same ones.
#include <gtest/gtest.h>

#include <cstring>

#include "base/error.hpp"
#include "kernels/attention/cuda/task_geometry.hpp"
#include "tests/kernels/attention/work_tables.hpp"

namespace ringattn::cuda {
namespace {

using testing::build;
using testing::Built;
using testing::expect_order;
using testing::HostTask;
using testing::kMasks;
using testing::kPackedTileShapes;
using testing::kShapes;
using testing::limits_of;
using testing::random_task;
using testing::walk;
using testing::whole_task;

TEST(WorkTiles, EveryRowOnceWithItsTilesInOrder) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    for (const WorkTileShape& shape : kShapes) {
      const HostTask random = random_task(shape, seed);
      AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 64, kMasks[seed % std::size(kMasks)]);
      const Built built = build(spec, random.task, shape);
      std::vector<int> visits(static_cast<std::size_t>(random.task.q.tokens), 0);
      for (std::int32_t i = 0; i < built.layout.work_tile_count; ++i) {
        const WorkTile& work_tile = built.at<WorkTile>(built.layout.work_tiles)[i];
        ASSERT_LE(work_tile.valid_row_end, shape.tile_rows);
        const std::vector<std::int64_t> tiles = walk(built, work_tile);
        for (std::int64_t slot = work_tile.valid_row_begin; slot < work_tile.valid_row_end; ++slot) {
          const std::int64_t row = work_tile.row + slot;
          ++visits[static_cast<std::size_t>(row)];
          const auto run = std::find_if(random.queries.begin(), random.queries.end(),
                                        [&](const QueryRun& q) { return q.row <= row && row < q.row + q.rows; });
          ASSERT_EQ(work_tile.position + slot, run->position + row - run->row);
          const std::int64_t length = random.key_lengths[static_cast<std::size_t>(run->sequence)];
          ASSERT_EQ(work_tile.key_length, length);
          const TileRange folded =
              Visibility(spec.mask, length).tiles(work_tile.position + slot, {shape.query_tile, shape.key_tile});
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

TEST(WorkTiles, RowsThatNothingHappensToAreLeftOut) {
  const WorkTileShape& shape = kShapes[0];
  const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  HostTask random = random_task(shape, 3);
  random.task.resume = true;
  const Built built = build(spec, random.task, shape);
  ASSERT_GT(built.layout.work_tile_count, 0);
  for (std::int32_t i = 0; i < built.layout.work_tile_count; ++i) {
    EXPECT_GT(built.at<WorkTile>(built.layout.work_tiles)[i].tiles, 0);
  }
  random.task.key_runs = {};
  EXPECT_EQ(build(spec, random.task, shape).layout.work_tile_count, 0);
}

TEST(WorkTiles, LongestFirst) {
  // A batch of causal sequences, in the cache together, or filling it one by one.
  for (const std::int64_t cache : {std::int64_t{1} << 40, std::int64_t{1}}) {
    WorkTileShape shape = kShapes[0];
    shape.cache_bytes = cache;
    const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
    const HostTask task = whole_task(shape, 3, 1024);
    const Built built = build(spec, task.task, shape);
    ASSERT_EQ(built.layout.work_tile_count, 24);
    EXPECT_EQ(built.layout.swizzle_heads, cache == 1 ? 4 : 8);
    const std::span work_tiles(built.at<WorkTile>(built.layout.work_tiles), 24);
    expect_order(built, work_tiles, [&](std::size_t i) { return cache == 1 ? work_tiles[i].run_begin : 0; });
    EXPECT_EQ(built.layout.early_entries, 21);  // all but the first work tile of each sequence
  }
}

// Tables that are kept for a task must be the ones that another task would get: every change of a task that can change
// them is noticed, and the same task with other tensors is not taken for another one.
TEST(TaskGeometry, FitsWhatHasTheSameTables) {
  const WorkTileShape& shape = kPackedTileShapes[0];
  const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  AttentionOutput output;
  std::vector<HostTask> tasks;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    for (int change = 0; change < 10; ++change) {
      HostTask t = random_task(shape, seed);
      if (change == 1) t.task.finish = &output;
      if (change == 2) t.task.resume = true;
      if (change == 3) t.task.save = false;
      if (change == 4 && !t.queries.empty()) t.queries.back().position += 64;
      if (change == 5 && !t.queries.empty()) t.queries.front().row += 1;
      if (change == 6) t.key_lengths.front() += 1000;
      if (change == 8 && !t.key_runs.empty()) t.key_runs.front().first_tile -= 1;
      if (change == 9) t.task.q.tokens += 1;
      if (change == 7 && !t.tiles.empty()) t.tiles.back().row += 128;
      tasks.push_back(std::move(t));
    }
  }
  int fitting = 0;
  for (const HostTask& kept : tasks) {
    TaskGeometry geometry;
    EXPECT_FALSE(geometry.fits(kept.task));
    geometry.reserve(limits_of(kept.task));
    geometry.remember(kept.task);
    EXPECT_TRUE(geometry.fits(kept.task));
    const Built expected = build(spec, kept.task, shape);
    for (const HostTask& other : tasks) {
      if (&other == &kept || !geometry.fits(other.task)) continue;
      ++fitting;
      const Built found = build(spec, other.task, shape);
      ASSERT_EQ(found.layout, expected.layout);
      const auto same = [&](std::size_t from, std::size_t to) {
        return std::memcmp(found.memory.data() + from, expected.memory.data() + from, to - from) == 0;
      };
      ASSERT_TRUE(same(0, expected.layout.tiles));
      for (std::size_t i = 0; i < kept.tiles.size(); ++i) {  // tile entries have gaps, which may hold anything
        ASSERT_EQ(found.at<TileEntry>(found.layout.tiles)[i].row, expected.at<TileEntry>(found.layout.tiles)[i].row);
      }
      ASSERT_TRUE(same(expected.layout.sources, expected.layout.bytes));
    }
    geometry.forget();
    EXPECT_FALSE(geometry.fits(kept.task));
  }
  EXPECT_GT(fitting, 40);  // the unchanged task, and the one that resumes nothing and saves nothing
}

TEST(TaskGeometry, NeverFitsSourcesThatTheTablesHold) {
  HostTask t = random_task(kShapes[0], 3);
  TaskGeometry geometry;
  t.sources.resize(kInlineSources + 1);
  t.task.sources = t.sources;
  geometry.reserve(limits_of(t.task));
  geometry.remember(t.task);
  EXPECT_FALSE(geometry.fits(t.task));
  t.task.sources = std::span(t.sources).first(kInlineSources);
  EXPECT_FALSE(geometry.fits(t.task));
  geometry.remember(t.task);
  EXPECT_TRUE(geometry.fits(t.task));
  t.task.sources = t.sources;
  EXPECT_FALSE(geometry.fits(t.task));
}

TEST(WorkTiles, RefusesMoreThanWasReserved) {
  const WorkTileShape& shape = kShapes[0];
  const HostTask random = random_task(shape, 5);
  const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  std::vector<std::byte> memory(64);
  WorkBuilder builder;
  EXPECT_THROW(builder.build(spec, random.task, shape, memory), Error);
}

}  // namespace
}  // namespace ringattn::cuda
