// SPDX-License-Identifier: Apache-2.0
#include "kernels/mask.hpp"

#include <gtest/gtest.h>

#include "kernels/fold.hpp"

namespace ringattn {
namespace {

bool sees(const Mask& mask, std::int64_t position, std::int64_t key) {
  return (mask.left < 0 || key >= position - mask.left) && (mask.right < 0 || key <= position + mask.right);
}

// Ranges and folded tiles, against every single key.
TEST(Mask, RangesHoldExactlyTheVisibleKeys) {
  for (const std::int64_t left : {-1, 0, 1, 6}) {
    for (const std::int64_t right : {-1, 0, 1, 6}) {
      const Mask mask{left, right};
      for (const std::int64_t length : {0, 1, 7, 16}) {
        TileRange previous{0, 0};
        for (std::int64_t position = -10; position < 30; ++position) {
          const KeyRange keys = visible_keys(mask, position, length);
          const TileRange tiles = folded_tiles(mask, position, length, 1, 4);
          for (std::int64_t key = 0; key < length; ++key) {
            ASSERT_EQ(key >= keys.begin && key < keys.end, sees(mask, position, key));
          }
          for (std::int64_t tile = 0; tile * 4 < length; ++tile) {
            bool folds = false;
            for (std::int64_t key = tile * 4; key < std::min(tile * 4 + 4, length); ++key) {
              folds = folds || sees(mask, position, key);
            }
            ASSERT_EQ(tile >= tiles.begin && tile < tiles.end, folds);
          }
          if (tiles.empty()) continue;
          ASSERT_GE(tiles.begin, previous.begin);
          ASSERT_GE(tiles.end, previous.end);
          previous = tiles;
        }
      }
    }
  }
}

// With a query tile a row folds what any position of its tile sees, also below zero.
TEST(Mask, QueryTilesShareTheirKeyTiles) {
  const Mask causal{-1, 0};
  EXPECT_EQ(folded_tiles(causal, 0, 100, 8, 4).end, 2);
  EXPECT_EQ(folded_tiles(causal, 7, 100, 8, 4).end, 2);
  EXPECT_EQ(folded_tiles(causal, 8, 100, 8, 4).end, 4);
  EXPECT_TRUE(folded_tiles(causal, -1, 100, 8, 4).empty());
  EXPECT_EQ(folded_tiles({3, 0}, 9, 100, 8, 4).begin, 1);
}

}  // namespace
}  // namespace ringattn
