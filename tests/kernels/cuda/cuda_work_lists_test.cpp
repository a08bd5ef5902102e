// SPDX-License-Identifier: Apache-2.0
// The tables that CUDA fold kernels read where there are lists of key tiles: every row once for every head, with
// exactly the listed tiles that it folds, in order, and the place of the first one.
#include <gtest/gtest.h>

#include <random>

#include "kernels/list_makers.hpp"
#include "kernels/registry.hpp"
#include "tests/kernels/cuda/work_tables.hpp"

namespace ringattn::cuda {
namespace {

using testing::Built;
using testing::HostTask;
using testing::kBundleShapes;
using testing::kMasks;
using testing::kShapes;
using testing::limits_of;
using testing::random_task;
using testing::walk;
using testing::whole_task;

constexpr int kHeads = 8;
constexpr int kKvHeads = 2;

class WorkLists : public ::testing::Test {
 protected:
  // Sequences with random runs of queries, each with one run of some of its keys.
  static HostTask some_keys(const WorkShape& shape, std::uint64_t seed) {
    HostTask task = random_task(shape, seed);
    task.key_runs.clear();
    task.tiles.clear();
    std::mt19937_64 random(seed);
    const std::vector<std::int64_t> lengths = std::move(task.key_lengths);
    task.key_lengths.clear();
    for (const std::int64_t length : lengths) {
      task.add_sequence(length);
      const std::int64_t tiles = (length + shape.key_tile - 1) / shape.key_tile;
      const auto first = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tiles + 1));
      if (first < tiles) task.add_keys(first, std::max<std::int64_t>(1, tiles - first - 1));
    }
    task.finish();
    return task;
  }

  static TileLists lists_for(const HostTask& task, const ListShape& shape, std::uint64_t seed) {
    std::vector<ListedSequence> sequences;
    for (std::size_t s = 0; s < task.key_lengths.size(); ++s) {
      ListedSequence of{0, 0, task.key_lengths[s]};
      for (const QueryRun& run : task.queries) {
        if (run.sequence != static_cast<std::int32_t>(s)) continue;
        if (of.queries == 0) of.position = run.position;
        of.queries = run.position + run.rows - of.position;
      }
      sequences.push_back(of);
    }
    return make_lists(shape, std::move(sequences), random_blocks(shape, {-1, -1}, static_cast<int>(seed % 9), seed));
  }

  // The tiles of the task that a row folds of its list, as walk() names them. `first` .. `last`: the positions that
  // share the row's tiles.
  static std::vector<std::int64_t> expected_tiles(const FoldSpec& spec, const HostTask& task, const WorkShape& shape,
                                                  std::int32_t sequence, std::int64_t first, std::int64_t last,
                                                  int head) {
    const TileLists& lists = *task.task.lists;
    const auto s = static_cast<std::size_t>(sequence);
    const TileRange seen = tiles_of(Visibility(spec.mask, task.key_lengths[s]).keys(first, last), shape.key_tile);
    std::vector<std::int64_t> tiles;
    const auto list =
        lists.list(s, list_head(lists.shape(), kHeads, head), query_block_of(first, lists.shape().query_block));
    for (const KeyRun& keys : task.key_runs) {
      if (keys.sequence != sequence) continue;
      for (std::int64_t tile = keys.first_tile; tile < keys.first_tile + keys.tiles; ++tile) {
        const std::int64_t block = tile * shape.key_tile / lists.shape().key_block;
        if (tile >= seen.begin && tile < seen.end && std::ranges::binary_search(list, block)) {
          tiles.push_back(100'000 * sequence + tile);
        }
      }
    }
    return tiles;
  }

  static std::int64_t expected_place(const FoldSpec& spec, const HostTask& task, const WorkShape& shape,
                                     std::int32_t sequence, std::int64_t position, int head, std::int64_t tile) {
    const TileLists& lists = *task.task.lists;
    const auto s = static_cast<std::size_t>(sequence);
    const int block_size = lists.shape().query_block;
    const std::int64_t block = query_block_of(position, block_size);
    const TileRange seen =
        tiles_of(Visibility(spec.mask, task.key_lengths[s]).keys(block * block_size, (block + 1) * block_size - 1),
                 shape.key_tile);
    const auto list = lists.list(s, list_head(lists.shape(), kHeads, head), block);
    std::int64_t place = seen.begin;
    for (std::int64_t t = seen.begin; t < tile; ++t) {
      if (std::ranges::binary_search(list, t * shape.key_tile / lists.shape().key_block)) ++place;
    }
    return place;
  }

  // Checks an item for one of its heads, and counts its rows.
  static void check_item(const FoldSpec& spec, const HostTask& task, const WorkShape& shape, const Built& built,
                         const WorkItem& item, int head, std::vector<int>& visits) {
    const std::int64_t first_row = item.row + item.slot_begin;
    const auto run = std::ranges::find_if(
        task.queries, [&](const QueryRun& q) { return q.row <= first_row && first_row < q.row + q.rows; });
    ASSERT_NE(run, task.queries.end());
    ASSERT_EQ(item.position + item.slot_begin, run->position + first_row - run->row);
    const int block = task.task.lists->shape().query_block;
    ASSERT_EQ(query_block_of(item.position + item.slot_begin, block),
              query_block_of(item.position + item.slot_end - 1, block));
    const std::int64_t last =
        shape.query_tile > 1 ? item.position + shape.query_tile - 1 : item.position + item.slot_end - 1;
    const std::vector<std::int64_t> tiles = walk(built, item);
    ASSERT_EQ(tiles, expected_tiles(spec, task, shape, run->sequence, item.position, last, head));
    // The tiles that every row sees whole are the plain ones.
    const Visibility visibility(spec.mask, item.key_length);
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const bool plain = static_cast<int>(i) >= item.plain_begin && static_cast<int>(i) < item.plain_end;
      ASSERT_EQ(plain, visibility.coverage(item.position, last, tiles[i] % 100'000 * shape.key_tile, shape.key_tile) ==
                           Coverage::kWhole);
    }
    if (!tiles.empty()) {
      ASSERT_EQ(item.place, expected_place(spec, task, shape, run->sequence, item.position, head, tiles[0] % 100'000) %
                                kGroupTiles);
    }
    for (std::int64_t slot = item.slot_begin; slot < item.slot_end; ++slot) {
      ++visits[static_cast<std::size_t>((item.row + slot) * kHeads + head)];
    }
  }

  static void check(const HostTask& task, const FoldSpec& spec, const WorkShape& shape) {
    FoldLimits limits = limits_of(task.task);
    for (const QueryRun& run : task.queries) {
      limits.list_runs += task.task.lists->runs(static_cast<std::size_t>(run.sequence), run.position, run.rows);
    }
    Built built;
    built.memory.assign(table_bytes(spec, shape, limits), std::byte{0xff});
    WorkBuilder builder;
    builder.reserve(spec, shape, limits);
    built.layout = builder.build(spec, task.task, shape, built.memory);
    EXPECT_FALSE(built.layout.keep_pace);
    std::vector<int> visits(static_cast<std::size_t>(task.task.q.tokens * kHeads), 0);
    visit_units(built, shape, [&](const WorkItem& item, int head, const WorkBundle* bundle, int query_head) {
      check_item(spec, task, shape, built, item, head, visits);
      if (bundle == nullptr) return;
      ASSERT_LE(bundle->units, shape.units * built.layout.walk_ctas);
      ASSERT_EQ(head / (kHeads / kKvHeads), query_head / (kHeads / kKvHeads));
      const std::vector<std::int64_t> whole = walk(built, *bundle);
      const std::vector<std::int64_t> own = walk(built, item);
      if (own.empty()) return;
      const std::int64_t begin = item.first - bundle->first;
      ASSERT_TRUE(begin >= 0 && begin + item.tiles <= bundle->tiles);
      ASSERT_TRUE(std::equal(own.begin(), own.end(), whole.begin() + begin));
    });
    ASSERT_EQ(visits, std::vector<int>(visits.size(), 1));
  }

  static void check_all(const WorkShape& shape) {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      for (const int heads : {1, kKvHeads, kHeads}) {
        const int blocks = 1 + static_cast<int>(seed % 3);
        HostTask task = some_keys(shape, seed);
        const ListShape lists{(shape.query_tile == 1 ? 24 : shape.query_tile) * blocks, shape.key_tile * blocks, heads};
        const TileLists made = lists_for(task, lists, seed);
        task.task.lists = &made;
        FoldSpec spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, 64, kMasks[seed % std::size(kMasks)]);
        spec.lists = lists;
        SCOPED_TRACE(describe(spec) + ", seed " + std::to_string(seed));
        check(task, spec, shape);
      }
    }
  }
};

TEST_F(WorkLists, EveryRowAndHeadOnceWithItsTiles) {
  for (const WorkShape& shape : kShapes) check_all(shape);
}

TEST_F(WorkLists, InBundlesToo) {
  for (const WorkShape& shape : kBundleShapes) check_all(shape);
}

// Query blocks with lists of their own make bundles of their own; CTAs walk side by side where a block has enough
// units.
TEST_F(WorkLists, BundlesDontMixLists) {
  const WorkShape shape{64, 64, 128, 3, std::int64_t{1} << 40, 132, 2};
  HostTask task = whole_task(shape, 1, 2304);
  for (const auto& [block, heads, bundles, ctas] :
       {std::tuple{128, 1, 18 * 3, 1}, {192, 1, 12 * 2, 2}, {192, kHeads, 12 * kHeads, 1}}) {
    FoldSpec spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, 64, {-1, -1});
    spec.lists = {block, 128, heads};
    const TileLists lists = lists_for(task, spec.lists, 8);
    task.task.lists = &lists;
    FoldLimits limits = limits_of(task.task);
    limits.list_runs = lists.runs(0, 0, 2304);
    std::vector<std::byte> memory(table_bytes(spec, shape, limits));
    const TableLayout layout = WorkBuilder().build(spec, task.task, shape, memory);
    EXPECT_EQ(layout.bundle_count, bundles) << block << ", " << heads;
    EXPECT_EQ(layout.walk_ctas, ctas) << block << ", " << heads;
    EXPECT_EQ(layout.piece_heads, heads == 1 ? kKvHeads : 1);
  }
}

// However few tiles a list has, lists of all query blocks together name tiles all over the sequence. So a section has
// as many heads as the cache holds of the whole sequence.
TEST_F(WorkLists, SectionsHoldWholeSequences) {
  WorkShape shape{64, 64, 128, 3, 0, 132, 2};
  HostTask task = whole_task(shape, 2, 2304);
  FoldSpec spec = make_spec(Dtype::kBf16, 12, 6, 64, {-1, 0});
  spec.lists = {192, 128, 1};
  const TileLists lists = lists_for(task, spec.lists, 2);
  task.task.lists = &lists;
  FoldLimits limits = limits_of(task.task);
  limits.list_runs = lists.runs(0, 0, 2304) + lists.runs(1, 0, 2304);
  std::vector<std::byte> memory(table_bytes(spec, shape, limits));
  const std::int64_t head_bytes = std::int64_t{2304} * (64 + 64) * 2;
  for (const auto& [heads, expected] : {std::pair{6, 6}, {5, 3}, {3, 3}, {2, 2}, {1, 1}, {0, 1}}) {
    shape.cache_bytes = heads * head_bytes;
    EXPECT_EQ(WorkBuilder().build(spec, task.task, shape, memory).section_heads, expected) << heads;
  }
}

}  // namespace
}  // namespace ringattn::cuda
