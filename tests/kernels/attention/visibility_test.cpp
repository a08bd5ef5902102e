// SPDX-License-Identifier: Apache-2.0
// Every answer of Visibility against a definition that looks at one query and one key at a time.
#include "kernels/attention/visibility.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace ringattn {
namespace {

bool lets_through(const Mask& mask, std::int64_t position, std::int64_t key) {
  return (mask.left < 0 || key >= position - mask.left) && (mask.right < 0 || key <= position + mask.right);
}

// Calls check(mask, visibility, length) for masks and lengths on both sides of a tile's size.
template <class Check>
void for_masks_and_lengths(Check check) {
  for (const std::int64_t left : {-1, 0, 1, 6}) {
    for (const std::int64_t right : {-1, 0, 1, 6}) {
      for (const std::int64_t length : {0, 1, 7, 16}) {
        SCOPED_TRACE(::testing::Message() << "mask " << left << "," << right << ", " << length << " keys");
        check(Mask{left, right}, Visibility({left, right}, length), length);
      }
    }
  }
}

// Ranges and computed tiles, against every single key.
TEST(Visibility, RangesHoldExactlyTheVisibleKeys) {
  for_masks_and_lengths([](const Mask& mask, const Visibility& visibility, std::int64_t length) {
    TileRange previous{0, 0};
    for (std::int64_t position = -10; position < 30; ++position) {
      const KeyRange keys = visibility.keys(position);
      const TileRange tiles = visibility.tiles(position, {1, 4});
      for (std::int64_t key = 0; key < length; ++key) {
        ASSERT_EQ(key >= keys.begin && key < keys.end, lets_through(mask, position, key));
      }
      for (std::int64_t tile = 0; tile * 4 < length; ++tile) {
        bool folds = false;
        for (std::int64_t key = tile * 4; key < std::min(tile * 4 + 4, length); ++key) {
          folds = folds || lets_through(mask, position, key);
        }
        ASSERT_EQ(tile >= tiles.begin && tile < tiles.end, folds);
      }
      if (tiles.empty()) continue;
      ASSERT_GE(tiles.begin, previous.begin);
      ASSERT_GE(tiles.end, previous.end);
      previous = tiles;
    }
  });
}

// The reach knows nothing of the sequence's ends, and moves with the position.
TEST(Visibility, RangeIsTheMaskAlone) {
  for_masks_and_lengths([](const Mask& mask, const Visibility& visibility, std::int64_t) {
    for (std::int64_t position = -10; position < 30; ++position) {
      const KeyRange reach = visibility.mask_range(position);
      for (std::int64_t key = -50; key < 80; ++key) {
        ASSERT_EQ(key >= reach.begin && key < reach.end, lets_through(mask, position, key));
      }
    }
  });
}

TEST(Visibility, SeveralQueries) {
  for_masks_and_lengths([](const Mask& mask, const Visibility& visibility, std::int64_t length) {
    for (std::int64_t first = -10; first < 30; ++first) {
      for (std::int64_t rows = 1; rows < 12; ++rows) {
        const std::int64_t last = first + rows - 1;
        const KeyRange some = visibility.keys(first, last);
        const KeyRange common = visibility.common_keys(first, last);
        double pairs = 0.0;
        for (std::int64_t key = 0; key < length; ++key) {
          std::int64_t seen = 0;
          for (std::int64_t position = first; position <= last; ++position) {
            seen += lets_through(mask, position, key) ? 1 : 0;
          }
          ASSERT_EQ(key >= some.begin && key<some.end, seen> 0) << first << " + " << rows;
          ASSERT_EQ(key >= common.begin && key < common.end, seen == rows) << first << " + " << rows;
          ASSERT_EQ(visibility.pairs(first, rows, {key, key + 1}), static_cast<double>(seen));
          pairs += static_cast<double>(seen);
        }
        ASSERT_EQ(visibility.pairs(first, rows), pairs);
        ASSERT_EQ(visibility.pairs(first, rows, {0, 0}), 0.0);
      }
    }
  });
}

// The tiles of several rows are those of each of them, with and without query tiles, also below zero.
TEST(Visibility, TilesOfSeveralRows) {
  for_masks_and_lengths([](const Mask&, const Visibility& visibility, std::int64_t length) {
    for (const TileSizes& sizes : {TileSizes{1, 4}, TileSizes{8, 4}, TileSizes{3, 5}}) {
      for (std::int64_t first = -10; first < 30; ++first) {
        for (std::int64_t rows = 1; rows < 12; ++rows) {
          const TileRange tiles = visibility.tiles(first, rows, sizes);
          for (std::int64_t tile = 0; tile * sizes.key < length; ++tile) {
            bool folds = false;
            for (std::int64_t position = first; position < first + rows; ++position) {
              const TileRange own = visibility.tiles(position, sizes);
              folds = folds || (tile >= own.begin && tile < own.end);
            }
            ASSERT_EQ(tile >= tiles.begin && tile < tiles.end, folds) << first << " + " << rows << ", tile " << tile;
          }
        }
      }
    }
  });
}

TEST(Visibility, CoverageOfTiles) {
  constexpr int kKeyTile = 4;
  int found[3] = {};
  for_masks_and_lengths([&](const Mask& mask, const Visibility& visibility, std::int64_t length) {
    for (std::int64_t first = -10; first < 30; ++first) {
      for (std::int64_t last = first; last < first + 12; ++last) {
        for (std::int64_t first_key = 0; first_key < length + kKeyTile; first_key += kKeyTile) {
          std::int64_t seen = 0;
          for (std::int64_t key = first_key; key < std::min(first_key + kKeyTile, length); ++key) {
            for (std::int64_t position = first; position <= last; ++position) {
              seen += lets_through(mask, position, key) ? 1 : 0;
            }
          }
          const Coverage expected = seen == 0                               ? Coverage::kAbsent
                                    : seen == kKeyTile * (last - first + 1) ? Coverage::kWhole
                                                                            : Coverage::kPartial;
          ASSERT_EQ(visibility.coverage(first, last, first_key, kKeyTile), expected)
              << first << " … " << last << ", key " << first_key;
          ++found[static_cast<int>(expected)];
        }
      }
    }
  });
  for (const int count : found) EXPECT_GT(count, 0);
}

TEST(Visibility, ColumnsOfATile) {
  for (std::int64_t begin = -3; begin < 14; ++begin) {
    for (std::int64_t end = begin; end < 14; ++end) {
      const ColumnRange columns = columns_of({begin, end}, 4, 4);
      ASSERT_TRUE(columns.begin >= 0 && columns.begin <= 4 && columns.end >= 0 && columns.end <= 4);
      for (int column = 0; column < 4; ++column) {
        ASSERT_EQ(column >= columns.begin && column < columns.end, 4 + column >= begin && 4 + column < end);
      }
    }
  }
}

// With a query tile a row computes what any position of its tile sees, also below zero.
TEST(Visibility, QueryTilesShareTheirKeyTiles) {
  const Visibility causal({-1, 0}, 100);
  EXPECT_EQ(causal.tiles(0, {8, 4}).end, 2);
  EXPECT_EQ(causal.tiles(7, {8, 4}).end, 2);
  EXPECT_EQ(causal.tiles(8, {8, 4}).end, 4);
  EXPECT_TRUE(causal.tiles(-1, {8, 4}).empty());
  EXPECT_EQ(Visibility({3, 0}, 100).tiles(9, {8, 4}).begin, 1);
}

// Positions and windows at the ends of what a job may have (check_job()) don't wrap around.
TEST(Visibility, FarPositions) {
  constexpr std::int64_t kFar = std::int64_t{1} << 62;
  for (const std::int64_t position : {-kFar / 4, kFar / 4}) {
    for (const Mask& mask : {Mask{-1, -1}, Mask{kFar, kFar}}) {
      const KeyRange keys = Visibility(mask, 1000).keys(position);
      EXPECT_EQ(keys.begin, 0);
      EXPECT_EQ(keys.end, 1000);
      EXPECT_EQ(Visibility(mask, 1000).pairs(position, 10), 10'000.0);
    }
    EXPECT_EQ(Visibility({-1, 0}, 1000).keys(position).empty(), position < 0);
  }
}

}  // namespace
}  // namespace ringattn
