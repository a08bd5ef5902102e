// SPDX-License-Identifier: Apache-2.0
// How sm90_scan deals bands of heads to CTAs: pure functions of a launch's shape. Needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>

#include "kernels/sm90/scan/band_blocks.hpp"

namespace ringattn::sm90 {
namespace {

constexpr int kMultiprocessors = 132;

cuda::ScanParams range(int first, int count, int group_heads, int segments) {
  cuda::ScanParams p{};
  p.first_head = first;
  p.head_count = count;
  p.group_heads = group_heads;
  p.segments = segments;
  return p;
}

// Each band of each segment is one CTA's, with bands of its group alone, and CTAs become no longer.
void expect_all_dealt(const cuda::ScanParams& p, const BandBlocks& blocks) {
  std::map<std::pair<std::int64_t, int>, int> seen;
  int before = kBandsTogether;
  for (int cta = 0; cta < (blocks.threes + blocks.shorts) * p.segments; ++cta) {
    const BandUnit unit = band_unit(p, blocks, cta);
    ASSERT_GE(unit.block.count, 1);
    ASSERT_LE(unit.block.count > 2 ? 2 : 1, before > 2 ? 2 : 1) << "a short CTA in front of a long one";
    before = unit.block.count;
    for (int band = unit.block.first; band < unit.block.first + unit.block.count; ++band) {
      EXPECT_EQ(band / blocks.bands / p.group_heads, unit.block.group);
      ++seen[{unit.segment, band}];
    }
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(p.segments) * static_cast<std::size_t>(p.head_count * blocks.bands));
  for (int segment = 0; segment < p.segments; ++segment) {
    for (int band = p.first_head * blocks.bands; band < (p.first_head + p.head_count) * blocks.bands; ++band) {
      const int times = seen[{segment, band}];
      EXPECT_EQ(times, 1) << "segment " << segment << ", band " << band;
    }
  }
}

TEST(Sm90Scan, DealsEachBandOnce) {
  for (const int bands : {1, 2}) {
    for (const int group_heads : {1, 2, 3, 4, 5, 8, 80}) {
      for (const int pairs : {0, 1, 4, 100}) {
        const cuda::ScanParams whole = range(0, group_heads * 2, group_heads, 3);
        expect_all_dealt(whole, count_blocks(whole, bands, pairs));
        const cuda::ScanParams part = range(group_heads / 2, group_heads, group_heads, 2);
        expect_all_dealt(part, count_blocks(part, bands, pairs));
      }
    }
  }
}

TEST(Sm90Scan, LeavesNoBandAloneButAGroupsOnlyOne) {
  for (int bands = 2; bands < 100; ++bands) {
    for (const int pairs : {0, 3, 100}) {
      const BandCut cut = cut_bands(bands, pairs);
      EXPECT_EQ(3 * cut.threes + 2 * cut.shorts, bands);
    }
  }
  EXPECT_EQ(cut_bands(1, 0).shorts, 1);
}

// 80 heads of 64 dims.
TEST(Sm90Scan, TakesPairsWhereALaunchEndsEarlier) {
  const auto dealt = [](int segments) { return deal_bands(range(0, 80, 80, segments), 1, kMultiprocessors); };
  EXPECT_EQ(dealt(1).threes, 0) << "40 pairs are a CTA of 40 multiprocessors";
  EXPECT_EQ(dealt(8).threes, 16) << "with 26 and a short one, 84 CTAs would begin when 132 end";
  EXPECT_EQ(dealt(8).shorts, 16);
  EXPECT_EQ(dealt(64).threes, 26);
}

// A time below which no order of these CTAs ends, and one that it keeps.
TEST(Sm90Scan, EndsOfLaunchesAreThoseOfGreedyOrders) {
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
