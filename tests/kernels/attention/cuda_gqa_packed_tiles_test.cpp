// SPDX-License-Identifier: Apache-2.0
// GQA-packed tiles, checked on the host: every work tile's heads once, in the order in which they should
// start, and for how many CTAs.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/common/registry.hpp"
#include "tests/kernels/attention/work_tables.hpp"

namespace ringattn::cuda {
namespace {

using testing::build;
using testing::Built;
using testing::expect_order;
using testing::HostTask;
using testing::kMasks;
using testing::kPackedTileShapes;
using testing::ragged_task;
using testing::random_task;
using testing::walk;
using testing::whole_task;

class GqaPackedTiles : public ::testing::Test {
 protected:
  void check(const AttentionSpec& spec, const HostTask& host, const WorkTileShape& shape) {
    SCOPED_TRACE(describe(spec));
    const Built built = build(spec, host.task, shape);
    ASSERT_LE(built.layout.bytes, built.memory.size());
    const auto* work_tiles = built.at<WorkTile>(built.layout.work_tiles);
    const int group = spec.heads / spec.kv_heads;
    const int head_tiles = shape.head_tiles * built.layout.cluster_ctas;
    std::vector<int> visits(static_cast<std::size_t>(built.layout.work_tile_count * group), 0);
    for (std::int32_t i = 0; i < built.layout.gqa_tile_count; ++i) {
      const GqaPackedTile& gqa_tile = built.at<GqaPackedTile>(built.layout.gqa_tiles)[i];
      ASSERT_GE(gqa_tile.head_tiles, 1);
      ASSERT_LE(gqa_tile.head_tiles, head_tiles);
      ASSERT_LT(gqa_tile.head, group);
      if (gqa_tile.head_tiles < head_tiles) {  // the first one of its sequence
        EXPECT_EQ(gqa_tile.head, 0);
        EXPECT_TRUE(gqa_tile.work_tile == 0 || sequence_of(host, work_tiles[gqa_tile.work_tile - 1]) !=
                                                   sequence_of(host, work_tiles[gqa_tile.work_tile]));
      }
      const std::vector<std::int64_t> tiles = walk(built, gqa_tile);
      std::int64_t begin = std::numeric_limits<std::int64_t>::max();
      std::int64_t end = 0;
      for (std::int32_t n = 0; n < gqa_tile.head_tiles; ++n) {
        const std::int32_t index = gqa_tile.work_tile + (gqa_tile.head + n) / group;
        ASSERT_LT(index, built.layout.work_tile_count);
        ++visits[static_cast<std::size_t>(index * group + (gqa_tile.head + n) % group)];
        const WorkTile& work_tile = work_tiles[index];
        ASSERT_EQ(sequence_of(host, work_tile), sequence_of(host, work_tiles[gqa_tile.work_tile]));
        if (work_tile.tiles == 0) continue;
        begin = std::min(begin, work_tile.first);
        end = std::max(end, work_tile.first + work_tile.tiles);
        // The head work tile's key tiles are a part of the KV loop, where the kernel looks for them.
        const std::vector<std::int64_t> own = walk(built, work_tile);
        ASSERT_LE(work_tile.first - gqa_tile.first + work_tile.tiles, gqa_tile.tiles);
        ASSERT_TRUE(std::equal(own.begin(), own.end(), tiles.begin() + (work_tile.first - gqa_tile.first)));
      }
      if (end == 0) {
        EXPECT_EQ(gqa_tile.tiles, 0);
      } else {
        EXPECT_EQ(gqa_tile.first, begin);
        EXPECT_EQ(gqa_tile.first + gqa_tile.tiles, end);
      }
    }
    ASSERT_EQ(visits, std::vector<int>(visits.size(), 1));
    if (built.layout.gqa_tile_count > 0) expect_counters_are_zero(built, shape);
  }

  static std::int32_t sequence_of(const HostTask& host, const WorkTile& work_tile) {
    const std::int64_t row = work_tile.row + work_tile.valid_row_begin;
    const auto run = std::find_if(host.queries.begin(), host.queries.end(),
                                  [row](const QueryRun& q) { return q.row <= row && row < q.row + q.rows; });
    return run->sequence;
  }

  static void expect_counters_are_zero(const Built& built, const WorkTileShape& shape) {
    const auto count = static_cast<std::size_t>(1 + shape.ctas);
    ASSERT_LE(built.layout.counters + count * sizeof(std::int32_t), built.memory.size());
    const auto* counters = built.at<std::int32_t>(built.layout.counters);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(counters[i], 0) << i;
  }

  static AttentionSpec spec_of(int group, const Mask& mask) { return make_spec(Dtype::kBf16, 2 * group, 2, 64, mask); }
};

TEST_F(GqaPackedTiles, EveryWorkTileAndHeadOnce) {
  for (const WorkTileShape& shape : kPackedTileShapes) {
    for (const Mask& mask : kMasks) {
      for (const int group : {1, 3, 4, 8}) {
        const AttentionSpec spec = spec_of(group, mask);
        for (const bool resume : {false, true}) {
          HostTask ragged = ragged_task(shape);
          ragged.task.resume = resume;
          check(spec, ragged, shape);
        }
        for (std::uint64_t seed = 1; seed <= 30; ++seed) check(spec, random_task(shape, seed), shape);
      }
    }
  }
}

// One work tile per row, and an incomplete tile in every sequence: the maximum that table_bytes() must provide for.
TEST_F(GqaPackedTiles, ManyShortSequencesHaveRoom) {
  for (const WorkTileShape& shape : kPackedTileShapes) {
    for (const int group : {1, 4}) check(spec_of(group, {-1, 0}), whole_task(shape, 500, 1), shape);
  }
}

TEST_F(GqaPackedTiles, LongestFirst) {
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{300, 0}}) {
    // Everything in the cache; sequences that fill it one by one.
    for (const auto& [cache, ctas] : {std::pair{std::int64_t{1} << 40, 1}, {1, 1}, {1, 132}}) {
      WorkTileShape shape = kPackedTileShapes[0];
      shape.cache_bytes = cache;
      shape.ctas = ctas;
      const Built built = build(spec_of(4, mask), whole_task(shape, 3, 1024).task, shape);
      constexpr std::int32_t kOfSequence = (1024 / 64 * 4 + 2) / 3;
      ASSERT_EQ(built.layout.gqa_tile_count, 3 * kOfSequence);
      EXPECT_EQ(built.layout.swizzle_heads, cache == 1 ? 1 : 2);
      const std::span gqa_tiles(built.at<GqaPackedTile>(built.layout.gqa_tiles), 3 * kOfSequence);
      expect_order(built, gqa_tiles, [&](std::size_t i) { return cache == 1 ? gqa_tiles[i].work_tile / 16 : 0; });
      EXPECT_EQ(built.layout.early_entries == built.layout.gqa_tile_count, mask == Mask(-1, -1));
    }
  }
}

// L2 swizzle groups have equally many heads, as many as the L2 cache holds.
TEST_F(GqaPackedTiles, SwizzleGroupsDivideTheHeads) {
  WorkTileShape shape = kPackedTileShapes[0];
  const HostTask task = whole_task(shape, 1, 1024);
  AttentionSpec spec = make_spec(Dtype::kBf16, 12, 6, 64, {-1, 0});
  const std::int64_t head_bytes = std::int64_t{1024} * (64 + 64) * 2;
  for (const auto& [heads, expected] : {std::pair{6, 6}, {5, 3}, {4, 3}, {3, 3}, {2, 2}, {1, 1}, {0, 1}}) {
    shape.cache_bytes = heads * head_bytes;
    EXPECT_EQ(build(spec, task.task, shape).layout.swizzle_heads, expected) << heads;
  }
}

TEST(WorkOrder, EverySchedulerEntryAndHeadOnce) {
  constexpr int kPieces = 7;
  constexpr int kHeads = 6;
  for (int early = 0; early <= kPieces; ++early) {
    for (const int swizzle_group : {1, 2, 3, 6}) {
      int last_section = 0;
      std::vector<int> visits(kPieces * kHeads, 0);
      for (int index = 0; index < kPieces * kHeads; ++index) {
        const WorkIndex found = work_index(early, kHeads, swizzle_group, index);
        ASSERT_TRUE(found.entry >= 0 && found.entry < kPieces && found.head >= 0 && found.head < kHeads);
        ++visits[static_cast<std::size_t>(found.entry * kHeads + found.head)];
        ASSERT_EQ(found.entry < early, index < early * kHeads);
        if (found.entry >= early) continue;
        ASSERT_GE(found.head / swizzle_group, last_section);
        last_section = found.head / swizzle_group;
      }
      EXPECT_EQ(visits, std::vector<int>(visits.size(), 1)) << early << ", " << swizzle_group;
    }
  }
}

// Half of the longest piece for each CTA: of a long sequence as many as that takes, of a short one all short ones.
TEST_F(GqaPackedTiles, EnoughIsLeftForLast) {
  for (const auto& [tokens, n] : {std::pair{2048, 0}, {1 << 16, 0}, {2048, 2}, {1 << 16, 2}}) {
    const WorkTileShape& shape = kPackedTileShapes[n];
    const AttentionSpec spec = spec_of(4, {-1, 0});
    const Built built = build(spec, whole_task(shape, 2, tokens).task, shape);
    ASSERT_EQ(built.layout.cluster_ctas, shape.cluster_ctas);
    const auto* gqa_tiles = built.at<GqaPackedTile>(built.layout.gqa_tiles);
    const std::int64_t most = (tokens + shape.key_tile - 1) / shape.key_tile;
    const std::int64_t enough = shape.ctas / shape.cluster_ctas * most / 2;
    std::int64_t work = 0;
    std::int64_t of_longest = 0;
    for (std::int32_t i = built.layout.early_entries; i < built.layout.gqa_tile_count; ++i) {
      work += std::int64_t{gqa_tiles[i].tiles} * spec.kv_heads;
      if (gqa_tiles[i].tiles == gqa_tiles[built.layout.early_entries].tiles) {
        of_longest += std::int64_t{gqa_tiles[i].tiles} * spec.kv_heads;
      }
    }
    EXPECT_LE(work - of_longest, enough);
    if (tokens == 2048) {
      EXPECT_EQ(gqa_tiles[built.layout.early_entries].tiles, most / 4);
    } else {
      EXPECT_LT(gqa_tiles[built.layout.early_entries].tiles, most / 4);
      EXPECT_GT(work, enough);
    }
  }
}

// In CTA pairs unless CTAs would idle too often: at the ends of short causal KV loops, or all along.
TEST_F(GqaPackedTiles, SideBySideWhereThatPays) {
  const WorkTileShape& shape = kPackedTileShapes[2];
  const auto cluster_ctas = [&](const Mask& mask, int group, int sequences, std::int64_t tokens) {
    return build(spec_of(group, mask), whole_task(shape, sequences, tokens).task, shape).layout.cluster_ctas;
  };
  for (const int group : {1, 4}) {
    EXPECT_EQ(cluster_ctas({-1, -1}, group, 3, 4096), 2);
    EXPECT_EQ(cluster_ctas({-1, 0}, group, 3, 8192), 2);
  }
  EXPECT_EQ(cluster_ctas({-1, 0}, 1, 3, 1024), 1);
  EXPECT_EQ(cluster_ctas({-1, 0}, 4, 3, 1024), 2);  // heads of the same rows
  EXPECT_EQ(cluster_ctas({-1, -1}, 1, 3, 128), 1);  // a CTA's head work tiles
  EXPECT_EQ(cluster_ctas({-1, -1}, 1, 3, 256), 2);
  EXPECT_EQ(cluster_ctas({-1, -1}, 1, 3, 1), 1);
  EXPECT_EQ(cluster_ctas({8000, 0}, 1, 1, 65536), 2);
  EXPECT_EQ(cluster_ctas({100, 0}, 1, 1, 65536), 1);
  // Three head work tiles per CTA gain less.
  const WorkTileShape three{64, 64, 128, 3, std::int64_t{1} << 40, 132, 2};
  const auto kv_loop_of_three = [&](int group, std::int64_t tokens) {
    return build(spec_of(group, {-1, 0}), whole_task(three, 3, tokens).task, three).layout.cluster_ctas;
  };
  EXPECT_EQ(cluster_ctas({-1, 0}, 1, 3, 4096), 2);
  EXPECT_EQ(kv_loop_of_three(1, 4096), 1);
  EXPECT_EQ(kv_loop_of_three(1, 8192), 2);
  EXPECT_EQ(kv_loop_of_three(4, 1024), 1);
  EXPECT_EQ(kv_loop_of_three(4, 2048), 2);
  // Whatever the shape allows where it allows one.
  EXPECT_EQ(build(spec_of(1, {-1, -1}), whole_task(kPackedTileShapes[0], 1, 4096).task, kPackedTileShapes[0])
                .layout.cluster_ctas,
            1);
}

// Nothing depends on the length of KV loops relative to their number.
TEST_F(GqaPackedTiles, FewRowsOfManyKeys) {
  const WorkTileShape& shape = kPackedTileShapes[0];
  HostTask t;
  t.add_sequence(1 << 20);
  t.add_queries((1 << 20) - 5, 5);
  t.add_keys(0, (1 << 20) / shape.key_tile);
  t.finish();
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}}) check(spec_of(4, mask), t, shape);
}

TEST_F(GqaPackedTiles, CtasKeepPaceOnKvLoopsFarBeyondTheCache) {
  for (const int group : {1, 4}) {
    const AttentionSpec spec = spec_of(group, {-1, -1});
    WorkTileShape shape = kPackedTileShapes[0];
    const HostTask one = whole_task(shape, 1, 64 * 128);
    const HostTask many = whole_task(shape, 64, 128);
    const std::int64_t head_bytes = std::int64_t{64} * 128 * (64 + 64) * 2;
    shape.cache_bytes = (head_bytes + 5) / 6;
    EXPECT_FALSE(build(spec, one.task, shape).layout.keep_pace);
    shape.cache_bytes -= 1;
    EXPECT_TRUE(build(spec, one.task, shape).layout.keep_pace);
    // As many keys in all, but no KV loop is long.
    EXPECT_FALSE(build(spec, many.task, shape).layout.keep_pace);
    // A window makes the KV loop short, however long the sequence is.
    EXPECT_FALSE(build(spec_of(group, {256, 0}), one.task, shape).layout.keep_pace);
  }
}

}  // namespace
}  // namespace ringattn::cuda
