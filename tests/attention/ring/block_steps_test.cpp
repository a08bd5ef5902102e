// SPDX-License-Identifier: Apache-2.0
// Where blocks may end: examples computed by hand, with key tiles of 128 and query tiles of 64.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "attention/ring/blocks.hpp"
#include "attention/tokens/tile_axis.hpp"

namespace ringattn {
namespace {

constexpr KernelShape kKernel{128, 64};

struct Steps {
  std::vector<std::int64_t> key_tiles;    // [steps + 1]
  std::vector<std::int64_t> query_tiles;  // [steps + 1]
  std::vector<std::int64_t> tokens;       // [steps + 1]

  bool operator==(const Steps&) const = default;
};

Steps listed(const BlockSteps& steps) {
  Steps all;
  for (std::int64_t step = 0; step <= steps.count(); ++step) {
    all.key_tiles.push_back(steps.tile(0, step));
    all.query_tiles.push_back(steps.tile(1, step));
    all.tokens.push_back(steps.token(step));
  }
  return all;
}

Steps steps_of(const Batch& batch) {
  const TileAxis keys(batch, kKernel.key_tile);
  const TileAxis queries(transposed(batch, kKernel.query_tile), kKernel.query_tile);
  return listed(BlockSteps(batch, keys, queries, kKernel));
}

TEST(TileAxis, CountsTheTokensOfAnIncompleteFirstTile) {
  // Queries at positions 70 … 169, in tiles that begin at 64 and 128.
  const TileAxis queries(transposed({{100, 50, 70}, {3, 0, 0}}, 64), 64);
  ASSERT_EQ(queries.tiles(), 3);
  EXPECT_EQ(queries.token(0), 0);
  EXPECT_EQ(queries.token(1), 58);
  EXPECT_EQ(queries.token(2), 100);
  EXPECT_EQ(queries.token(3), 103);
  EXPECT_EQ(queries.first(1), 2);
}

TEST(BlockSteps, AreKeyTilesWhereOnlyKeysTravel) {
  const TileAxis keys(Batch{{0, 300, 0}, {0, 5, 0}}, kKernel.key_tile);
  EXPECT_EQ(listed(BlockSteps(keys)), (Steps{{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, {0, 128, 256, 300, 305}}));
}

TEST(BlockSteps, HoldKeysAndQueriesOfTheSamePositions) {
  EXPECT_EQ(steps_of({{300, 300, 0}}), (Steps{{0, 1, 2, 3}, {0, 2, 4, 5}, {0, 128, 256, 300}}));
  // Queries at 270 … 299, in tiles that begin at 256.
  EXPECT_EQ(steps_of({{30, 300, 270}}), (Steps{{0, 1, 2, 3}, {0, 0, 0, 1}, {0, 128, 256, 300}}));
}

// Queries at −130 … 269, in tiles that begin at −192; keys at 0 … 99.
TEST(BlockSteps, HoldQueriesBeforeTheFirstKeyAndAfterTheLast) {
  EXPECT_EQ(steps_of({{400, 100, -130}}), (Steps{{0, 0, 0, 1, 1, 1}, {0, 1, 3, 5, 7, 8}, {0, 2, 130, 258, 386, 400}}));
}

TEST(BlockSteps, SkipPositionsWithoutTokens) {
  EXPECT_EQ(steps_of({{10, 128, 1000}}), (Steps{{0, 1, 1}, {0, 0, 1}, {0, 128, 138}}));
  EXPECT_EQ(steps_of({{10, 128, -1000}}), (Steps{{0, 0, 1}, {0, 1, 1}, {0, 10, 138}}));
}

TEST(BlockSteps, EndWithEachSequence) {
  EXPECT_EQ(steps_of({{0, 130, 0}, {70, 0, 0}, {0, 0, 5}, {1, 1, 0}}),
            (Steps{{0, 1, 2, 2, 3}, {0, 0, 0, 2, 3}, {0, 128, 130, 200, 201}}));
  EXPECT_EQ(steps_of({}), (Steps{{0}, {0}, {0}}));
}

TEST(BlockSteps, AreFoundByTheirTokens) {
  const TileAxis keys(Batch{{0, 300, 0}}, kKernel.key_tile);
  const BlockSteps steps(keys);
  EXPECT_EQ(steps.step_from(0), 0);
  EXPECT_EQ(steps.step_from(1), 1);
  EXPECT_EQ(steps.step_from(128), 1);
  EXPECT_EQ(steps.step_from(257), 3);
}

}  // namespace
}  // namespace ringattn
