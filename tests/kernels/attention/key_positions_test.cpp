// SPDX-License-Identifier: Apache-2.0
// Keys at positions of their own: what is seen, against the mask's words; when positions may be left out; refusals.
#include "kernels/attention/key_positions.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr Mask kMasks[] = {{-1, 0}, {-1, -1}, {-1, 3}, {0, 0}, {5, 0}, {5, 7}, {60, 0}, {0, -1}, {9, -1}, {-1, 90}};

std::vector<std::int32_t> some_positions(std::int64_t kept, std::int64_t whole, std::uint64_t seed) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(whole));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), std::mt19937_64(seed));
  all.resize(static_cast<std::size_t>(kept));
  std::ranges::sort(all);
  return all;
}

bool sees(const Mask& mask, std::int64_t query, std::int64_t key) {
  return (mask.left < 0 || key >= query - mask.left) && (mask.right < 0 || key <= query + mask.right);
}

TEST(KeyPositions, QueriesSeeTheKeysThatTheMaskLetsThrough) {
  for (const std::int64_t kept : {0, 1, 3, 20, 40}) {
    const std::vector<std::int32_t> positions = some_positions(kept, 40, static_cast<std::uint64_t>(kept));
    for (const Mask& mask : kMasks) {
      const PositionedVisibility visibility(mask, positions);
      double pairs = 0.0;
      for (std::int64_t query = -5; query < 50; ++query) {
        const KeyRange keys = visibility.keys(query);
        for (std::int64_t i = 0; i < kept; ++i) {
          const bool seen = i >= keys.begin && i < keys.end;
          EXPECT_EQ(seen, sees(mask, query, positions[static_cast<std::size_t>(i)]))
              << describe(mask) << query << ", " << i;
          pairs += seen && i >= 2 && i < 17 ? 1.0 : 0.0;
        }
      }
      EXPECT_EQ(visibility.pairs(-5, 55, {std::min<std::int64_t>(2, kept), std::min<std::int64_t>(17, kept)}), pairs);
      EXPECT_EQ(visibility.pairs(-5, 0, {0, kept}), 0.0);
      const TileRange tiles = visibility.tiles(3, 20, {8, 4});
      const KeyRange some = visibility.keys(0, 23);
      EXPECT_TRUE(some.empty() ? tiles.empty() : tiles.begin == some.begin / 4 && tiles.end == (some.end + 3) / 4);
    }
  }
}

// What kernels of a device compare, in the type of positions, at both ends of it.
TEST(KeyPositions, AreWithinAMasksRange) {
  constexpr std::int64_t kLast = std::numeric_limits<std::int32_t>::max();
  const std::int64_t queries[] = {-50, -1, 0, 1, 40, kLast - 30, kLast, kLast + 1, kLast + 30, 2 * kLast + 5};
  const std::int64_t keys[] = {0, 1, 17, 39, 40, 41, kLast - 60, kLast - 30, kLast - 1, kLast};
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{0, 0}, Mask{9, 2}, Mask{30, 0}, Mask{3, -1}, Mask{-1, 30},
                           Mask{kLast, kLast}}) {
    for (const std::int64_t query : queries) {
      const PositionSpan span = positions_within(Visibility(mask, 0).mask_range(query));
      for (const std::int64_t key : keys) {
        EXPECT_EQ(span.has(static_cast<std::int32_t>(key)), sees(mask, query, key)) << query << ", " << key;
      }
      EXPECT_FALSE(span.has(kNoPosition));
    }
  }
}

// Sums of positions count pairs of many keys; one by one they are as many.
TEST(KeyPositions, CountPairsOfAnyKeys) {
  const std::vector<std::int32_t> own = some_positions(500, 1100, 5);
  const KeyPositions positions("positions", 1, {{500, 1100}}, own);
  EXPECT_EQ(positions.sums(0, 0).size(), 8U);
  for (const Mask& mask : kMasks) {
    const SequenceVisibility visibility(mask, 500, &positions, 0);
    for (const KeyRange& keys : {KeyRange{0, 500}, {0, 64}, {63, 65}, {70, 71}, {100, 100}, {130, 449}, {448, 500}}) {
      for (const auto& [query, rows] : {std::pair{0, 1100}, {-30, 200}, {500, 1}, {700, 333}, {1050, 300}, {1200, 5}}) {
        double pairs = 0.0;
        for (std::int64_t row = query; row < query + rows; ++row) {
          for (std::int64_t i = keys.begin; i < keys.end; ++i)
            pairs += sees(mask, row, own[static_cast<std::size_t>(i)]) ? 1 : 0;
        }
        EXPECT_EQ(visibility.pairs(query, rows, keys), pairs) << describe(mask) << keys.begin << ", " << query;
      }
    }
  }
}

TEST(KeyPositions, OfAllTokensAreNone) {
  std::vector<std::int32_t> all(300);
  std::iota(all.begin(), all.end(), 0);
  const KeyPositions positions("positions", 1, {{300, 300}}, all);
  for (const Mask& mask : kMasks) {
    const SequenceVisibility with(mask, 300, &positions, 0), without(mask, 300, nullptr, 0);
    for (const std::int64_t query : {-20, 0, 1, 127, 250, 299, 340}) {
      for (const std::int64_t rows : {1, 70}) {
        for (const TileSizes& sizes : {TileSizes{1, 128}, TileSizes{64, 64}}) {
          const TileRange a = with.tiles(query, rows, sizes), b = without.tiles(query, rows, sizes);
          EXPECT_TRUE((a.empty() && b.empty()) || (a.begin == b.begin && a.end == b.end)) << describe(mask) << query;
        }
        EXPECT_EQ(with.pairs(query, rows, {10, 200}), without.pairs(query, rows, {10, 200})) << describe(mask) << query;
      }
    }
  }
}

// Where a position is named, each query sees there what it sees by positions; where none is, none would do.
TEST(KeyPositions, AreLeftOutWhereAShiftSaysTheSame) {
  std::int64_t moved = 0, kept_as_they_are = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const std::int64_t whole = 30, kept = static_cast<std::int64_t>(seed % 28) + 2;
    std::vector<std::int32_t> rows;
    std::vector<std::vector<std::int32_t>> of_head;
    const int heads = 1 + static_cast<int>(seed % 2);
    const std::int64_t last =
        std::min<std::int64_t>(kept, static_cast<std::int64_t>(seed % 5));  // kept tokens at the end
    for (int head = 0; head < heads; ++head) {
      std::vector<std::int32_t> own =
          some_positions(kept - last, whole - last, seed * 2 + static_cast<std::uint64_t>(head));
      for (std::int64_t t = whole - last; t < whole; ++t) own.push_back(static_cast<std::int32_t>(t));
      of_head.push_back(own);
    }
    for (std::int64_t i = 0; i < kept; ++i) {
      for (const auto& own : of_head) rows.push_back(own[static_cast<std::size_t>(i)]);
    }
    const KeyPositions positions("positions", heads, {{kept, whole}}, rows);
    for (const Mask& mask : kMasks) {
      for (const auto& queries : {std::pair{30, 4}, {29, 1}, {28, 4}, {20, 10}, {0, 30}, {26, 2}}) {
        const std::int64_t query = queries.first, count = queries.second;
        const auto position = position_without_gaps(mask, positions, 0, query, count);
        (position ? moved : kept_as_they_are) += 1;
        const auto same = [&](std::int64_t at) {
          for (std::int64_t row = 0; row < count; ++row) {
            for (const auto& own : of_head) {
              for (std::int64_t i = 0; i < kept; ++i) {
                if (sees(mask, at + row, i) != sees(mask, query + row, own[static_cast<std::size_t>(i)])) return false;
              }
            }
          }
          return true;
        };
        if (position) {
          EXPECT_TRUE(same(*position)) << seed << describe(mask) << query << ", " << count;
        }
        // Under a causal mask the search finds every case in which the last query sees all keys.
        const bool all = std::ranges::all_of(of_head, [&](const auto& own) { return own.back() < query + count; });
        if (!position && mask.is_causal() && all) {
          for (std::int64_t at = -5; at < 60; ++at) EXPECT_FALSE(same(at)) << seed << ", " << query << ", " << at;
        }
      }
    }
  }
  EXPECT_GT(moved, 100);
  EXPECT_GT(kept_as_they_are, 100);
}

TEST(KeyPositions, HaveAFirstGapOfAnyHead) {
  // Head 0 lacks 2 and 5, head 1 lacks 4 and 5.
  const std::int32_t rows[] = {0, 0, 1, 1, 3, 2, 4, 3};
  const KeyPositions positions("k_positions", 2, {{4, 6}}, rows);
  EXPECT_EQ(first_gap(positions, 0, 0, 6), 2);
  EXPECT_EQ(first_gap(positions, 0, 0, 2), std::nullopt);
  EXPECT_EQ(first_gap(positions, 0, 3, 4), std::nullopt);
  EXPECT_EQ(first_gap(positions, 0, 3, 6), 4);
  EXPECT_EQ(first_gap(positions, 0, 5, 6), 5);
  EXPECT_EQ(first_gap(positions, 0, 4, 4), std::nullopt);
  EXPECT_EQ(first_gap(positions, 0, 6, 3), std::nullopt);
}

TEST(KeyPositions, BadOnesAreRefusedByIndex) {
  const std::vector<KeptSequence> sequences{{2, 5}, {3, 9}};
  const auto text_of = [&](const std::vector<std::int32_t>& rows, int heads) {
    const Error error = error_of([&] { KeyPositions("k_positions", heads, sequences, rows, ErrorCode::kFile); });
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    return std::string(error.what());
  };
  const std::vector<std::int32_t> good{0, 1, 4, 3, /**/ 0, 2, 7, 3, 8, 8};
  const KeyPositions fine("k_positions", 2, sequences, good, ErrorCode::kFile);
  EXPECT_TRUE(std::ranges::equal(fine.of(1, 1), std::vector<std::int32_t>{2, 3, 8}));
  EXPECT_FALSE(fine ==
               KeyPositions("other", 2, {{2, 5}, {3, 9}}, std::vector<std::int32_t>{0, 1, 4, 3, 0, 2, 7, 4, 8, 8}));
  const auto with = [&](std::size_t at, std::int32_t value) {
    std::vector<std::int32_t> rows = good;
    rows[at] = value;
    return rows;
  };
  EXPECT_NE(
      text_of(with(7, 2), 2).find("k_positions [3, 1] is 2 (the key before it, of sequence 1 and head 1, is at 2)"),
      std::string::npos)
      << text_of(with(7, 2), 2);
  EXPECT_NE(text_of(with(8, 6), 2).find("k_positions [4, 0] is 6"), std::string::npos);
  EXPECT_NE(text_of(with(8, 9), 2).find("sequence 1 had 9 tokens before some were evicted"), std::string::npos);
  EXPECT_NE(text_of(with(0, -1), 2).find("k_positions [0, 0] is -1"), std::string::npos);
  EXPECT_NE(text_of({0, 1, 2}, 2).find("has 3 positions"), std::string::npos);
}

// Kernels that lack them say so, and the choice passes them over or refuses.
TEST(KeyPositions, KernelsSayWhetherTheyKnowThem) {
  AttentionSpec spec;
  spec.positions = 1;
  int able = 0;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    const std::vector<std::string> missing = row.missing(spec);
    able += missing.empty() ? 1 : 0;
    if (missing.empty()) continue;
    EXPECT_NE(missing[0].find("key positions (supported:"), std::string::npos);
  }
  EXPECT_GE(able, 1);
  EXPECT_TRUE(choose_kernel(spec, {"cpu", "auto"}).row->name == "cpu_attention");
  EXPECT_NE(describe(spec).find("keys at positions"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
