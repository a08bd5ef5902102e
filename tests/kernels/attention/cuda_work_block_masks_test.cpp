// SPDX-License-Identifier: Apache-2.0
// The tables that CUDA attention kernels read where there is a block mask: every row once for every head, with
// exactly its tiles of the mask, in order, and the index of the first one.
#include <gtest/gtest.h>

#include <random>

#include "kernels/attention/block_mask_patterns.hpp"
#include "kernels/common/registry.hpp"
#include "tests/kernels/attention/work_tables.hpp"

namespace ringattn::cuda {
namespace {

using testing::Built;
using testing::HostTask;
using testing::kMasks;
using testing::kPackedTileShapes;
using testing::kShapes;
using testing::limits_of;
using testing::random_task;
using testing::walk;
using testing::whole_task;

constexpr int kHeads = 8;
constexpr int kKvHeads = 2;

class WorkBlockMasks : public ::testing::Test {
 protected:
  // Sequences with random runs of queries, each with one run of some of its keys.
  static HostTask some_keys(const WorkTileShape& shape, std::uint64_t seed) {
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

  static BlockMask block_mask_for(const HostTask& task, const BlockMaskShape& shape, std::uint64_t seed) {
    std::vector<MaskedSequence> sequences;
    for (std::size_t s = 0; s < task.key_lengths.size(); ++s) {
      MaskedSequence of{0, 0, task.key_lengths[s]};
      for (const QueryRun& run : task.queries) {
        if (run.sequence != static_cast<std::int32_t>(s)) continue;
        if (of.queries == 0) of.position = run.position;
        of.queries = run.position + run.rows - of.position;
      }
      sequences.push_back(of);
    }
    return make_block_mask(shape, std::move(sequences),
                           random_blocks(shape, {-1, -1}, static_cast<int>(seed % 9), seed));
  }

  // The tiles of the task that a row's mask names, as walk() names them. `first` .. `last`: the positions that
  // share the row's tiles.
  static std::vector<std::int64_t> expected_tiles(const AttentionSpec& spec, const HostTask& task,
                                                  const WorkTileShape& shape, std::int32_t sequence, std::int64_t first,
                                                  std::int64_t last, int head) {
    const BlockMask& block_mask = *task.task.block_mask;
    const auto s = static_cast<std::size_t>(sequence);
    const TileRange seen = tiles_of(Visibility(spec.mask, task.key_lengths[s]).keys(first, last), shape.key_tile);
    std::vector<std::int64_t> tiles;
    const auto list = block_mask.row(s, mask_head(block_mask.shape(), kHeads, head),
                                     query_block_of(first, block_mask.shape().query_block));
    for (const KeyRun& keys : task.key_runs) {
      if (keys.sequence != sequence) continue;
      for (std::int64_t tile = keys.first_tile; tile < keys.first_tile + keys.tiles; ++tile) {
        const std::int64_t block = tile * shape.key_tile / block_mask.shape().key_block;
        if (tile >= seen.begin && tile < seen.end && std::ranges::binary_search(list, block)) {
          tiles.push_back(100'000 * sequence + tile);
        }
      }
    }
    return tiles;
  }

  static std::int64_t expected_place(const AttentionSpec& spec, const HostTask& task, const WorkTileShape& shape,
                                     std::int32_t sequence, std::int64_t position, int head, std::int64_t tile) {
    const BlockMask& block_mask = *task.task.block_mask;
    const auto s = static_cast<std::size_t>(sequence);
    const int block_size = block_mask.shape().query_block;
    const std::int64_t block = query_block_of(position, block_size);
    const TileRange seen =
        tiles_of(Visibility(spec.mask, task.key_lengths[s]).keys(block * block_size, (block + 1) * block_size - 1),
                 shape.key_tile);
    const auto list = block_mask.row(s, mask_head(block_mask.shape(), kHeads, head), block);
    std::int64_t place = seen.begin;
    for (std::int64_t t = seen.begin; t < tile; ++t) {
      if (std::ranges::binary_search(list, t * shape.key_tile / block_mask.shape().key_block)) ++place;
    }
    return place;
  }

  // Checks a work tile for one of its heads, and counts its rows.
  static void check_item(const AttentionSpec& spec, const HostTask& task, const WorkTileShape& shape,
                         const Built& built, const WorkTile& work_tile, int head, std::vector<int>& visits) {
    const std::int64_t first_row = work_tile.row + work_tile.valid_row_begin;
    const auto run = std::ranges::find_if(
        task.queries, [&](const QueryRun& q) { return q.row <= first_row && first_row < q.row + q.rows; });
    ASSERT_NE(run, task.queries.end());
    ASSERT_EQ(work_tile.position + work_tile.valid_row_begin, run->position + first_row - run->row);
    const int block = task.task.block_mask->shape().query_block;
    ASSERT_EQ(query_block_of(work_tile.position + work_tile.valid_row_begin, block),
              query_block_of(work_tile.position + work_tile.valid_row_end - 1, block));
    const std::int64_t last = shape.query_tile > 1 ? work_tile.position + shape.query_tile - 1
                                                   : work_tile.position + work_tile.valid_row_end - 1;
    const std::vector<std::int64_t> tiles = walk(built, work_tile);
    ASSERT_EQ(tiles, expected_tiles(spec, task, shape, run->sequence, work_tile.position, last, head));
    // The tiles that every row sees whole are the plain ones.
    const Visibility visibility(spec.mask, work_tile.key_length);
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const bool plain =
          static_cast<int>(i) >= work_tile.unmasked_begin && static_cast<int>(i) < work_tile.unmasked_end;
      ASSERT_EQ(plain, visibility.coverage(work_tile.position, last, tiles[i] % 100'000 * shape.key_tile,
                                           shape.key_tile) == Coverage::kWhole);
    }
    if (!tiles.empty()) {
      ASSERT_EQ(work_tile.split_position,
                expected_place(spec, task, shape, run->sequence, work_tile.position, head, tiles[0] % 100'000) %
                    kTilesPerKvSplit);
    }
    for (std::int64_t slot = work_tile.valid_row_begin; slot < work_tile.valid_row_end; ++slot) {
      ++visits[static_cast<std::size_t>((work_tile.row + slot) * kHeads + head)];
    }
  }

  static void check(const HostTask& task, const AttentionSpec& spec, const WorkTileShape& shape) {
    AttentionLimits limits = limits_of(task.task);
    for (const QueryRun& run : task.queries) {
      limits.mask_tile_runs +=
          task.task.block_mask->runs(static_cast<std::size_t>(run.sequence), run.position, run.rows);
    }
    Built built;
    built.memory.assign(table_bytes(spec, shape, limits), std::byte{0xff});
    WorkBuilder builder;
    builder.reserve(spec, shape, limits);
    built.layout = builder.build(spec, task.task, shape, built.memory);
    EXPECT_FALSE(built.layout.keep_pace);
    std::vector<int> visits(static_cast<std::size_t>(task.task.q.tokens * kHeads), 0);
    visit_work_tiles(built, shape,
                     [&](const WorkTile& work_tile, int head, const GqaPackedTile* gqa_tile, int query_head) {
                       check_item(spec, task, shape, built, work_tile, head, visits);
                       if (gqa_tile == nullptr) return;
                       ASSERT_LE(gqa_tile->head_tiles, shape.head_tiles * built.layout.cluster_ctas);
                       ASSERT_EQ(head / (kHeads / kKvHeads), query_head / (kHeads / kKvHeads));
                       const std::vector<std::int64_t> whole = walk(built, *gqa_tile);
                       const std::vector<std::int64_t> own = walk(built, work_tile);
                       if (own.empty()) return;
                       const std::int64_t begin = work_tile.first - gqa_tile->first;
                       ASSERT_TRUE(begin >= 0 && begin + work_tile.tiles <= gqa_tile->tiles);
                       ASSERT_TRUE(std::equal(own.begin(), own.end(), whole.begin() + begin));
                     });
    ASSERT_EQ(visits, std::vector<int>(visits.size(), 1));
  }

  static void check_all(const WorkTileShape& shape) {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      for (const int heads : {1, kKvHeads, kHeads}) {
        const int blocks = 1 + static_cast<int>(seed % 3);
        HostTask task = some_keys(shape, seed);
        const BlockMaskShape block_mask{(shape.query_tile == 1 ? 24 : shape.query_tile) * blocks,
                                        shape.key_tile * blocks, heads};
        const BlockMask made = block_mask_for(task, block_mask, seed);
        task.task.block_mask = &made;
        AttentionSpec spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, 64, kMasks[seed % std::size(kMasks)]);
        spec.block_mask = block_mask;
        SCOPED_TRACE(describe(spec) + ", seed " + std::to_string(seed));
        check(task, spec, shape);
      }
    }
  }
};

TEST_F(WorkBlockMasks, EveryRowAndHeadOnceWithItsTiles) {
  for (const WorkTileShape& shape : kShapes) check_all(shape);
}

TEST_F(WorkBlockMasks, InGqaPackedTilesToo) {
  for (const WorkTileShape& shape : kPackedTileShapes) check_all(shape);
}

// Query blocks with masks of their own make GQA-packed tiles of their own; CTAs pair up where a block has enough
// head_tiles.
TEST_F(WorkBlockMasks, GqaPackedTilesDontMixBlockMasks) {
  const WorkTileShape shape{64, 64, 128, 3, std::int64_t{1} << 40, 132, 2};
  HostTask task = whole_task(shape, 1, 2304);
  for (const auto& [block, heads, gqa_tiles, ctas] :
       {std::tuple{128, 1, 18 * 3, 1}, {192, 1, 12 * 2, 2}, {192, kHeads, 12 * kHeads, 1}}) {
    AttentionSpec spec = make_spec(Dtype::kBf16, kHeads, kKvHeads, 64, {-1, -1});
    spec.block_mask = {block, 128, heads};
    const BlockMask block_mask = block_mask_for(task, spec.block_mask, 8);
    task.task.block_mask = &block_mask;
    AttentionLimits limits = limits_of(task.task);
    limits.mask_tile_runs = block_mask.runs(0, 0, 2304);
    std::vector<std::byte> memory(table_bytes(spec, shape, limits));
    const TableLayout layout = WorkBuilder().build(spec, task.task, shape, memory);
    EXPECT_EQ(layout.gqa_tile_count, gqa_tiles) << block << ", " << heads;
    EXPECT_EQ(layout.cluster_ctas, ctas) << block << ", " << heads;
    EXPECT_EQ(layout.entry_heads, heads == 1 ? kKvHeads : 1);
  }
}

// However few tiles a mask row has, rows of all query blocks together name tiles all over the sequence. So a swizzle
// group has as many heads as the cache holds of the whole sequence.
TEST_F(WorkBlockMasks, SwizzleGroupsHoldWholeSequences) {
  WorkTileShape shape{64, 64, 128, 3, 0, 132, 2};
  HostTask task = whole_task(shape, 2, 2304);
  AttentionSpec spec = make_spec(Dtype::kBf16, 12, 6, 64, {-1, 0});
  spec.block_mask = {192, 128, 1};
  const BlockMask block_mask = block_mask_for(task, spec.block_mask, 2);
  task.task.block_mask = &block_mask;
  AttentionLimits limits = limits_of(task.task);
  limits.mask_tile_runs = block_mask.runs(0, 0, 2304) + block_mask.runs(1, 0, 2304);
  std::vector<std::byte> memory(table_bytes(spec, shape, limits));
  const std::int64_t head_bytes = std::int64_t{2304} * (64 + 64) * 2;
  for (const auto& [heads, expected] : {std::pair{6, 6}, {5, 3}, {3, 3}, {2, 2}, {1, 1}, {0, 1}}) {
    shape.cache_bytes = heads * head_bytes;
    EXPECT_EQ(WorkBuilder().build(spec, task.task, shape, memory).swizzle_heads, expected) << heads;
  }
}

}  // namespace
}  // namespace ringattn::cuda
