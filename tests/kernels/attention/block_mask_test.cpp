// SPDX-License-Identifier: Apache-2.0
// Block masks by themselves: runs, indices and pairs against definitions that look at one tile at a time; what
// patterns list; bad masks refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "kernels/attention/block_mask_patterns.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

constexpr BlockMaskShape kShape{64, 256, 2};

std::vector<std::int32_t> list_of(const BlockMask& block_mask, int head, std::int64_t block, std::size_t sequence = 0) {
  const auto list = block_mask.row(sequence, head, block);
  return {list.begin(), list.end()};
}

TEST(BlockMask, RunsPlacesAndPairsByDefinition) {
  constexpr int kKeyTile = 128;
  const std::vector<MaskedSequence> sequences = {{-70, 300, 1000}, {0, 0, 500}, {512, 200, 700}, {3, 90, 0}};
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{300, 0}, Mask{100, 260}}) {
    const BlockMask block_mask = make_block_mask(kShape, sequences, random_blocks(kShape, {-1, -1}, 2, 7));
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      const TileRange blocks = block_mask.query_blocks(s);
      for (std::int64_t q = blocks.begin; q < blocks.end; ++q) {
        for (int head = 0; head < kShape.heads; ++head) {
          const auto sees = [&](std::int64_t position, std::int64_t key) {
            return (mask.left < 0 || key >= position - mask.left) && (mask.right < 0 || key <= position + mask.right);
          };
          const std::vector<std::int32_t> list = list_of(block_mask, head, q, s);
          const auto listed = [&](std::int64_t key) {
            return std::find(list.begin(), list.end(), key / kShape.key_block) != list.end();
          };
          // Tiles that a position of the block sees, and of those the listed ones.
          std::map<std::int64_t, std::int64_t> expected;  // tile → ordinal
          std::int64_t ordinal = -1;
          for (std::int64_t tile = 0; tile * kKeyTile < sequences[s].keys; ++tile) {
            bool seen = false;
            for (std::int64_t p = q * 64; p < (q + 1) * 64; ++p) {
              for (std::int64_t key = tile * kKeyTile; key < std::min((tile + 1) * kKeyTile, sequences[s].keys);
                   ++key) {
                seen = seen || sees(p, key);
              }
            }
            if (!seen) continue;
            if (ordinal < 0) ordinal = tile;
            if (listed(tile * kKeyTile)) expected[tile] = ordinal++;
          }
          std::map<std::int64_t, std::int64_t> found;
          std::int64_t end = -1;
          for_each_masked_tile_run(block_mask, mask, kKeyTile, s, head, q, [&](const MaskedTileRun& run) {
            EXPECT_GT(run.tiles.begin, end);  // as long as can be
            end = run.tiles.end;
            for (std::int64_t tile = run.tiles.begin; tile < run.tiles.end; ++tile) {
              found[tile] = run.ordinal + tile - run.tiles.begin;
            }
          });
          EXPECT_EQ(found, expected) << s << ", " << head << ", " << q;
        }
      }
      const KeyRange keys{100, 700};
      double pairs = 0.0;
      const std::int64_t first = sequences[s].position + 5;
      const std::int64_t rows = std::min<std::int64_t>(sequences[s].queries, 130) - 5;
      for (std::int64_t p = first; p < first + rows; ++p) {
        for (std::int64_t key = keys.begin; key < std::min(keys.end, sequences[s].keys); ++key) {
          if ((mask.left >= 0 && key < p - mask.left) || (mask.right >= 0 && key > p + mask.right)) continue;
          for (int head = 0; head < kShape.heads; ++head) {
            const auto list = list_of(block_mask, head, query_block_of(p, 64), s);
            if (std::find(list.begin(), list.end(), key / kShape.key_block) != list.end()) pairs += 0.5;
          }
        }
      }
      EXPECT_EQ(masked_pairs(block_mask, mask, s, first, rows, keys), pairs) << s;
    }
  }
}

TEST(BlockMask, CountRunsOfBlocks) {
  const BlockMaskShape shape{64, 64, 1};
  const BlockMask block_mask(shape, {{0, 128, 640}}, {0, 5, 5}, {0, 1, 3, 8, 9});
  EXPECT_EQ(block_mask.runs(0, 0, 64), 3);
  EXPECT_EQ(block_mask.runs(0, 63, 2), 3);
  EXPECT_EQ(block_mask.runs(0, 64, 64), 0);
  EXPECT_EQ(block_mask.runs(0, 0, 0), 0);
}

TEST(BlockMask, KnowEachOther) {
  const BlockMaskShape shape{64, 64, 1};
  const BlockMask a(shape, {{0, 64, 128}}, {0, 1}, {1});
  const BlockMask copy = a;
  const BlockMask same(shape, {{0, 64, 128}}, {0, 1}, {1});
  const BlockMask other(shape, {{0, 64, 128}}, {0, 1}, {0});
  EXPECT_EQ(copy.id(), a.id());
  EXPECT_NE(same.id(), a.id());
  EXPECT_TRUE(same == a);
  EXPECT_FALSE(other == a);
}

TEST(BlockMask, BadOnesAreRefusedByName) {
  const BlockMaskShape shape{64, 64, 2};
  const std::vector<MaskedSequence> sequences = {{0, 128, 100}, {64, 64, 300}};  // 4 mask rows and 2 mask rows
  const auto error = [&](std::vector<std::int64_t> begins, std::vector<std::int32_t> blocks,
                         const BlockMaskShape& with = BlockMaskShape{64, 64, 2}) {
    const auto message = testing::error_of([&] { BlockMask(with, sequences, begins, blocks); });
    return std::string(message.what());
  };
  EXPECT_NE(error({0, 0, 0, 0, 0, 0}, {}).find("a block mask has 5 rows"), std::string::npos);
  EXPECT_NE(error({0, 0, 0, 0, 0, 0, 1}, {5}).find("key block 5 in the mask row of sequence 1, head 1, query block 1"),
            std::string::npos);
  EXPECT_NE(
      error({0, 0, 0, 1, 1, 1, 1}, {-1}).find("key block -1 in the mask row of sequence 0, head 1, query block 0"),
      std::string::npos);
  EXPECT_NE(error({0, 0, 2, 2, 2, 2, 2}, {1, 0})
                .find("key block 0 after 1 in the mask row of sequence 0, head 0, query "
                      "block 1"),
            std::string::npos);
  EXPECT_NE(error({0, 2, 2, 2, 2, 2, 2}, {1, 1}).find("key block 1 after 1"), std::string::npos);
  EXPECT_NE(error({1, 1, 1, 1, 1, 1, 1}, {0}).find("entries 1 to 1"), std::string::npos);
  EXPECT_NE(error({0, 1, 0, 0, 0, 0, 0}, {0}).find("entries 1 to 0"), std::string::npos);
  EXPECT_NE(error({0, 9, 9, 9, 9, 9, 9}, {0}).find("entries 0 to 9"), std::string::npos);
  EXPECT_NE(error({0, 0, 0, 0, 0, 0, 0}, {0}).find("end at entry 0"), std::string::npos);
  EXPECT_NE(error({}, {}, {0, 64, 1}).find("blocks of 0 queries and 64 keys"), std::string::npos);
  BlockMask(shape, sequences, {0, 0, 2, 2, 2, 3, 3}, {0, 1, 4});
}

TEST(BlockMaskMakers, Masks) {
  const BlockMaskShape shape{64, 64, 2};
  const std::vector<MaskedSequence> sequences = {{0, 100, 130}, {0, 0, 70}, {64, 1, 600}};
  // [2, 2, 3], nothing, [2, 1, 10]
  const std::vector<std::uint8_t> mask = {1, 0, 1, 0, 0, 0, 0, 7, 0, 1, 1, 1, 0, 0, 0, 0,
                                          0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const BlockMask block_mask = block_mask_from_bytes(shape, sequences, mask);
  EXPECT_EQ(list_of(block_mask, 0, 0), (std::vector<std::int32_t>{0, 2}));
  EXPECT_TRUE(list_of(block_mask, 0, 1).empty());
  EXPECT_EQ(list_of(block_mask, 1, 0), (std::vector<std::int32_t>{1}));
  EXPECT_EQ(list_of(block_mask, 1, 1), (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(list_of(block_mask, 0, 1, 2), (std::vector<std::int32_t>{8, 9}));
  EXPECT_EQ(list_of(block_mask, 1, 1, 2), (std::vector<std::int32_t>{0}));
  const std::vector<std::uint8_t> bits = {5, 0, 2, 7, 0, 3, 1, 0};
  EXPECT_TRUE(block_mask_from_bits(shape, sequences, bits) == block_mask);
  EXPECT_THROW(block_mask_from_bytes(shape, sequences, std::span(mask).first(31)), Error);
  EXPECT_THROW(block_mask_from_bits(shape, sequences, std::span(bits).first(7)), Error);
  std::vector<std::uint8_t> longer = mask;
  longer.push_back(0);
  EXPECT_THROW(block_mask_from_bytes(shape, sequences, longer), Error);
}

TEST(BlockMaskMakers, Patterns) {
  const BlockMaskShape shape{64, 64, 1};
  const auto listed = [&](const BlockMaskPattern& make, std::int64_t block) {
    return list_of(make_block_mask(shape, {{0, 640, 640}}, make), 0, block);
  };
  using Blocks = std::vector<std::int32_t>;
  EXPECT_EQ(listed(all_blocks(), 3), (Blocks{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(listed(window_blocks(shape, 0), 3), (Blocks{3}));
  EXPECT_EQ(listed(window_blocks(shape, 1), 3), (Blocks{2, 3, 4}));
  EXPECT_EQ(listed(window_blocks(shape, 64), 0), (Blocks{0, 1}));
  EXPECT_EQ(listed(window_blocks(shape, 65), 9), (Blocks{7, 8, 9}));
  EXPECT_EQ(listed(global_blocks(shape, 65), 9), (Blocks{0, 1}));
  EXPECT_EQ(listed(global_blocks(shape, 65), 1).size(), 10U);
  EXPECT_TRUE(listed(global_blocks(shape, 0), 0).empty());
  EXPECT_EQ(listed(strided_blocks(shape, 192), 7), (Blocks{2, 4, 5, 6, 7, 8}));
  EXPECT_EQ(listed(vertical_slash_blocks(shape, {{{5, 300, 9999}, {0, 128}}}), 6), (Blocks{0, 4, 6}));
  EXPECT_EQ(listed(vertical_slash_blocks(shape, {{{}, {32}}}), 6), (Blocks{5, 6}));
  EXPECT_EQ(listed(union_of_patterns({window_blocks(shape, 0), global_blocks(shape, 64)}), 6), (Blocks{0, 6}));
  EXPECT_THROW(window_blocks(shape, -1), Error);
  EXPECT_THROW(strided_blocks(shape, 0), Error);
  EXPECT_THROW(vertical_slash_blocks(shape, {}), Error);
}

TEST(BlockMaskMakers, StridesOfAnyLength) {
  const BlockMaskShape shape{64, 64, 1};
  for (const std::int64_t stride : {1, 2, 63, 64, 65, 100, 192, 639, 640, 641}) {
    const BlockMask block_mask = make_block_mask(shape, {{0, 640, 630}}, strided_blocks(shape, stride));
    std::set<std::int32_t> expected;
    for (std::int64_t key = 0; key < 630; ++key) {
      const bool last = (key + 1) % stride == 0;
      if (last || (key >= 5 * 64 - stride && key < 6 * 64)) expected.insert(static_cast<std::int32_t>(key / 64));
    }
    EXPECT_EQ(list_of(block_mask, 0, 5), std::vector<std::int32_t>(expected.begin(), expected.end())) << stride;
  }
}

// Lists of more than 16 MiB are counted first, so that their makers are called twice.
TEST(BlockMaskMakers, LargeBlockMasksAreThoseThatWereCounted) {
  const BlockMaskShape shape{1, 1, 1};
  const std::vector<MaskedSequence> sequences = {{0, 2200, 2200}};
  std::vector<std::uint8_t> mask(2200 * 2200, 1);
  mask[2200 * 7 + 9] = 0;
  const BlockMask block_mask = block_mask_from_bytes(shape, sequences, mask);
  EXPECT_EQ(block_mask.indices().size(), mask.size() - 1);
  EXPECT_EQ(list_of(block_mask, 0, 7).size(), 2199U);
  EXPECT_EQ(list_of(block_mask, 0, 2199).size(), 2200U);
}

TEST(BlockMaskMakers, BlockMasksThatDontFitAreNotMade) {
  const BlockMaskShape shape{64, 64, 1};
  const std::vector<MaskedSequence> sequences = {{0, 640, 640}};
  const auto code = [&](std::int64_t bytes) {
    return testing::error_of([&] { make_block_mask(shape, sequences, all_blocks(), {bytes, "said so"}); });
  };
  EXPECT_EQ(make_block_mask(shape, sequences, all_blocks(), {block_mask_bytes(10, 100), ""}).indices().size(), 100U);
  for (const std::int64_t bytes : {block_mask_bytes(10, 100) - 1, block_mask_bytes(10, 0) - 1}) {
    EXPECT_EQ(code(bytes).code(), ErrorCode::kMemory);
    EXPECT_NE(std::string(code(bytes).what()).find("bytes (said so). Use larger blocks"), std::string::npos);
  }
  const BlockMaskShape fine{1 << 20, 1, 1};
  EXPECT_EQ(testing::error_of([&] {
              make_block_mask(fine, {{0, 1, kMaxMaskBlocks + 1}}, all_blocks());
            }).code(),
            ErrorCode::kMemory);
  EXPECT_THROW(random_blocks(shape, {-1, -1}, 65537, 0), Error);
}

// The same on every rank, other ones for each mask row, and all of the blocks in the long run.
TEST(BlockMaskMakers, RandomBlocks) {
  const BlockMaskShape shape{64, 64, 4};
  const std::vector<MaskedSequence> sequences = {{0, 6400, 6400}, {0, 6400, 6400}};
  const Mask causal{-1, 0};
  const BlockMask block_mask = make_block_mask(shape, sequences, random_blocks(shape, causal, 3, 42));
  EXPECT_TRUE(block_mask == make_block_mask(shape, sequences, random_blocks(shape, causal, 3, 42)));
  EXPECT_FALSE(block_mask == make_block_mask(shape, sequences, random_blocks(shape, causal, 3, 43)));
  std::set<std::int32_t> drawn;
  std::set<std::vector<std::int32_t>> different;
  for (int head = 0; head < 4; ++head) {
    for (std::int64_t q = 0; q < 100; ++q) {
      const std::vector<std::int32_t> list = list_of(block_mask, head, q, 1);
      ASSERT_FALSE(list.empty());
      ASSERT_LE(list.back(), q);
      ASSERT_LE(list.size(), 3U);
      drawn.insert(list.begin(), list.end());
      different.insert(list);
    }
  }
  EXPECT_GT(drawn.size(), 90U);
  EXPECT_GT(different.size(), 380U);
}

}  // namespace
}  // namespace ringattn
