// SPDX-License-Identifier: Apache-2.0
// The tables that CUDA attention kernels read where keys have positions of their own: every row once for every head,
// with exactly the tiles that hold a key that its query tile sees; which of them every row sees whole; and the
// positions of their keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/attention/cuda/task_geometry.hpp"
#include "kernels/common/registry.hpp"
#include "tests/kernels/attention/work_tables.hpp"
#include "tests/support/random_key_positions.hpp"

namespace ringattn::cuda {
namespace {

using testing::build;
using testing::Built;
using testing::HostTask;
using testing::kMasks;
using testing::kPackedTileShapes;
using testing::kShapes;
using testing::limits_of;
using testing::random_positions;
using testing::random_task;
using testing::walk;

constexpr int kHeads = 8;
constexpr int kKvHeads = 2;

// Queries at first … last: whether some of them sees a key, and whether all do.
struct Seen {
  bool by_some;
  bool by_all;
};
Seen seen(const Mask& mask, std::int64_t first, std::int64_t last, std::int64_t key) {
  const std::int64_t from = mask.right < 0 ? first : key - mask.right;  // queries that see the key
  const std::int64_t to = mask.left < 0 ? last : key + mask.left;
  return {std::max(first, from) <= std::min(last, to), from <= first && last <= to};
}

class WorkPositions : public ::testing::Test {
 protected:
  // Checks a work tile for one of its heads, and counts its rows.
  static void check_item(const AttentionSpec& spec, const HostTask& task, const WorkTileShape& shape,
                         const Built& built, const WorkTile& work_tile, int head, std::vector<int>& visits) {
    const std::int64_t first_row = work_tile.row + work_tile.valid_row_begin;
    const auto run = std::ranges::find_if(
        task.queries, [&](const QueryRun& q) { return q.row <= first_row && first_row < q.row + q.rows; });
    ASSERT_NE(run, task.queries.end());
    ASSERT_EQ(work_tile.position + work_tile.valid_row_begin, run->position + first_row - run->row);
    const std::int64_t last = shape.query_tile > 1 ? work_tile.position + shape.query_tile - 1
                                                   : work_tile.position + work_tile.valid_row_end - 1;
    const int kv_head = head / (kHeads / kKvHeads);
    const auto own = positions_of(task.task.positions, static_cast<std::size_t>(run->sequence), kv_head);
    ASSERT_EQ(work_tile.position_list, spec.positions == 1 ? 0 : kv_head);

    std::vector<std::int64_t> expected;
    std::vector<bool> plain;
    for (const KeyRun& keys : task.key_runs) {
      if (keys.sequence != run->sequence) continue;
      for (std::int64_t tile = keys.first_tile; tile < keys.first_tile + keys.tiles; ++tile) {
        bool some = false, all = (tile + 1) * shape.key_tile <= work_tile.key_length;
        for (std::int64_t key = tile * shape.key_tile;
             key < std::min(work_tile.key_length, (tile + 1) * shape.key_tile); ++key) {
          const Seen one = seen(spec.mask, work_tile.position, last, own[static_cast<std::size_t>(key)]);
          some = some || one.by_some;
          all = all && one.by_all;
        }
        if (!some) continue;
        expected.push_back(100'000 * keys.sequence + tile);
        plain.push_back(all);
      }
    }
    const std::vector<std::int64_t> tiles = walk(built, work_tile);
    ASSERT_EQ(tiles, expected);
    if (!tiles.empty()) {
      ASSERT_EQ(work_tile.split_position, tiles[0] % 100'000 % kTilesPerKvSplit);
    }
    const auto* positions = built.at<std::int32_t>(built.layout.positions);
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      ASSERT_EQ(static_cast<int>(i) >= work_tile.unmasked_begin && static_cast<int>(i) < work_tile.unmasked_end,
                plain[i]);
      const auto entry = std::ranges::find(task.tiles, tiles[i], &PageRun::row) - task.tiles.begin();
      const std::int32_t* const of_tile =
          positions + (entry * spec.positions + work_tile.position_list) * shape.key_tile;
      for (int column = 0; column < shape.key_tile; ++column) {
        const std::int64_t key = tiles[i] % 100'000 * shape.key_tile + column;
        ASSERT_EQ(of_tile[column], key < work_tile.key_length ? own[static_cast<std::size_t>(key)] : kNoPosition);
      }
    }
    for (std::int64_t slot = work_tile.valid_row_begin; slot < work_tile.valid_row_end; ++slot) {
      ++visits[static_cast<std::size_t>((work_tile.row + slot) * kHeads + head)];
    }
  }

  static void check(const HostTask& task, const AttentionSpec& spec, const WorkTileShape& shape) {
    const Built built = build(spec, task.task, shape);
    std::vector<int> visits(static_cast<std::size_t>(task.task.q.tokens * kHeads), 0);
    visit_work_tiles(built, shape, [&](const WorkTile& work_tile, int head, const GqaPackedTile*, int) {
      check_item(spec, task, shape, built, work_tile, head, visits);
    });
    ASSERT_EQ(visits, std::vector<int>(visits.size(), 1));
  }

  static void check_all(const WorkTileShape& shape) {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      for (const int heads : {1, kKvHeads}) {
        HostTask task = random_task(shape, seed);
        const auto positions = random_positions(task.key_lengths, heads, seed);
        task.task.positions = positions.get();
        AttentionSpec spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, 64, kMasks[seed % std::size(kMasks)]);
        spec.positions = heads;
        SCOPED_TRACE(describe(spec) + ", seed " + std::to_string(seed));
        check(task, spec, shape);
      }
    }
  }
};

TEST_F(WorkPositions, EveryRowAndHeadOnceWithItsTiles) {
  for (const WorkTileShape& shape : kShapes) check_all(shape);
}

TEST_F(WorkPositions, InGqaPackedTilesToo) {
  for (const WorkTileShape& shape : kPackedTileShapes) check_all(shape);
}

// Where all keys stand at their indices, work tiles are those without positions, and where one mask serves all heads
// they count for all of them.
TEST_F(WorkPositions, OfAllTokensLeaveTheWorkTilesAsTheyAre) {
  const WorkTileShape& shape = kShapes[0];
  const HostTask plain = testing::ragged_task(shape);
  HostTask with = testing::ragged_task(shape);
  std::vector<KeptSequence> kept;
  std::vector<std::int32_t> rows;
  for (const std::int64_t keys : with.key_lengths) {
    kept.push_back({keys, keys});
    for (std::int64_t key = 0; key < keys; ++key) rows.push_back(static_cast<std::int32_t>(key));
  }
  const KeyPositions positions("positions", 1, kept, rows);
  with.task.positions = &positions;
  AttentionSpec spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, 64, {300, 0});
  const Built without = build(spec, plain.task, shape);
  spec.positions = 1;
  const Built built = build(spec, with.task, shape);
  ASSERT_EQ(built.layout.work_tile_count, without.layout.work_tile_count);
  EXPECT_EQ(built.layout.entry_heads, kHeads);
  EXPECT_EQ(built.layout.early_entries, without.layout.early_entries);
  for (int i = 0; i < built.layout.work_tile_count; ++i) {
    const WorkTile& a = built.at<WorkTile>(built.layout.work_tiles)[i];
    const WorkTile& b = without.at<WorkTile>(without.layout.work_tiles)[i];
    EXPECT_EQ(a.row, b.row);
    EXPECT_EQ(a.tiles, b.tiles);
    EXPECT_EQ(walk(built, a), walk(without, b));
  }
}

// Tasks that differ in nothing but their positions have tables of their own.
TEST_F(WorkPositions, AreAPartOfTheGeometry) {
  HostTask task = random_task(kShapes[0], 3);
  const auto one = random_positions(task.key_lengths, 1, 1);
  const auto other = random_positions(task.key_lengths, 1, 2);
  const KeyPositions copy = *one;
  task.task.positions = one.get();
  TaskGeometry geometry;
  geometry.reserve(limits_of(task.task));
  geometry.remember(task.task);
  EXPECT_TRUE(geometry.fits(task.task));
  task.task.positions = &copy;
  EXPECT_TRUE(geometry.fits(task.task));
  task.task.positions = other.get();
  EXPECT_FALSE(geometry.fits(task.task));
  task.task.positions = nullptr;
  EXPECT_FALSE(geometry.fits(task.task));
}

}  // namespace
}  // namespace ringattn::cuda
