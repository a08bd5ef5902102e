// SPDX-License-Identifier: Apache-2.0
// How sm90_ssd deals dim_blocks of heads to CTAs: pure functions of a launch's shape. Needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>

#include "kernels/ssm/sm90/dim_blocks.hpp"

namespace ringattn::sm90 {
namespace {

constexpr int kMultiprocessors = 132;

cuda::SsmParams range(int first, int count, int group_heads, int segments) {
  cuda::SsmParams p{};
  p.first_head = first;
  p.head_count = count;
  p.group_heads = group_heads;
  p.segments = segments;
  return p;
}

// Each dim_block of each segment is computed by exactly one CTA. A CTA's dim_blocks are of one group, and long CTAs
// come before short ones.
void expect_all_dealt(const cuda::SsmParams& p, const DimBlockPartition& blocks) {
  std::map<std::pair<std::int64_t, int>, int> seen;
  int before = kDimBlocksPerCta;
  for (int cta = 0; cta < (blocks.threes + blocks.shorts) * p.segments; ++cta) {
    const DimBlockCta unit = dim_block_cta(p, blocks, cta);
    ASSERT_GE(unit.block.count, 1);
    ASSERT_LE(unit.block.count > 2 ? 2 : 1, before > 2 ? 2 : 1) << "a short CTA in front of a long one";
    before = unit.block.count;
    for (int dim_block = unit.block.first; dim_block < unit.block.first + unit.block.count; ++dim_block) {
      EXPECT_EQ(dim_block / blocks.dim_blocks / p.group_heads, unit.block.group);
      ++seen[{unit.segment, dim_block}];
    }
  }
  EXPECT_EQ(seen.size(),
            static_cast<std::size_t>(p.segments) * static_cast<std::size_t>(p.head_count * blocks.dim_blocks));
  for (int segment = 0; segment < p.segments; ++segment) {
    for (int dim_block = p.first_head * blocks.dim_blocks;
         dim_block < (p.first_head + p.head_count) * blocks.dim_blocks; ++dim_block) {
      const int times = seen[{segment, dim_block}];
      EXPECT_EQ(times, 1) << "segment " << segment << ", dim_block " << dim_block;
    }
  }
}

TEST(Sm90Ssd, DealsEachDimBlockOnce) {
  for (const int dim_blocks : {1, 2}) {
    for (const int group_heads : {1, 2, 3, 4, 5, 8, 80}) {
      for (const int pairs : {0, 1, 4, 100}) {
        const cuda::SsmParams whole = range(0, group_heads * 2, group_heads, 3);
        expect_all_dealt(whole, count_blocks(whole, dim_blocks, pairs));
        const cuda::SsmParams part = range(group_heads / 2, group_heads, group_heads, 2);
        expect_all_dealt(part, count_blocks(part, dim_blocks, pairs));
      }
    }
  }
}

TEST(Sm90Ssd, LeavesNoDimBlockAloneButAGroupsOnlyOne) {
  for (int dim_blocks = 2; dim_blocks < 100; ++dim_blocks) {
    for (const int pairs : {0, 3, 100}) {
      const DimBlockCut cut = cut_dim_blocks(dim_blocks, pairs);
      EXPECT_EQ(3 * cut.threes + 2 * cut.shorts, dim_blocks);
    }
  }
  EXPECT_EQ(cut_dim_blocks(1, 0).shorts, 1);
}

// 80 heads of 64 dims.
TEST(Sm90Ssd, TakesPairsWhereALaunchEndsEarlier) {
  const auto dealt = [](int segments) { return deal_dim_blocks(range(0, 80, 80, segments), 1, kMultiprocessors); };
  EXPECT_EQ(dealt(1).threes, 0) << "40 pairs are a CTA of 40 multiprocessors";
  EXPECT_EQ(dealt(8).threes, 16) << "with 26 and a short one, 84 CTAs would begin when 132 end";
  EXPECT_EQ(dealt(8).shorts, 16);
  EXPECT_EQ(dealt(64).threes, 26);
}

// A time below which no order of these CTAs ends, and one that it keeps.
TEST(Sm90Ssd, EndsOfLaunchesAreThoseOfGreedyOrders) {
  const auto end = [](int threes, int shorts) { return end_of_launch({1, 0, threes, shorts}, 1, 4); };
  EXPECT_EQ(end(4, 0), 4);
  EXPECT_EQ(end(5, 0), 8);
  EXPECT_EQ(end(0, 4), 3);
  EXPECT_EQ(end(0, 5), 6);
  EXPECT_EQ(end(3, 2), 6);
  EXPECT_EQ(end(5, 3), 8);
}

}  // namespace
}  // namespace ringattn::sm90
