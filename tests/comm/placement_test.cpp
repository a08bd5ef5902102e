// SPDX-License-Identifier: Apache-2.0
#include "comm/placement.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ringattn {
namespace {

using Devices = std::vector<int>;

RankGpus rank_on(const std::string& host, int process, std::vector<std::string> uuids) {
  return {host, std::to_string(process), std::move(uuids), ""};
}

TEST(Placement, RanksGetTheGpuOfTheirNumber) {
  const std::vector<std::string> all = {"a", "b", "c", "d"};
  const std::vector<RankGpus> ranks = {rank_on("n", 1, all), rank_on("n", 2, all), rank_on("n", 3, all)};
  const Placement placement = place_ranks(ranks);
  EXPECT_EQ(placement.obstacle, "");
  EXPECT_EQ(placement.devices, (Devices{0, 1, 2}));
  EXPECT_TRUE(placement.one_host);
  EXPECT_FALSE(placement.shared);
}

TEST(Placement, NumbersCountOnEachHost) {
  const std::vector<RankGpus> ranks = {rank_on("n", 1, {"a", "b"}), rank_on("m", 1, {"c", "d"}),
                                       rank_on("n", 2, {"a", "b"}), rank_on("m", 2, {"c", "d"})};
  const Placement placement = place_ranks(ranks);
  EXPECT_EQ(placement.devices, (Devices{0, 0, 1, 1}));
  EXPECT_FALSE(placement.one_host);
}

TEST(Placement, OneVisibleGpuPerRank) {
  const std::vector<RankGpus> ranks = {rank_on("n", 1, {"a"}), rank_on("n", 2, {"b"}), rank_on("n", 3, {"c"})};
  const Placement placement = place_ranks(ranks);
  EXPECT_EQ(placement.obstacle, "");
  EXPECT_EQ(placement.devices, (Devices{0, 0, 0}));
  EXPECT_FALSE(placement.shared);
}

TEST(Placement, OverlappingViewsFindAFreeGpu) {
  const std::vector<RankGpus> ranks = {rank_on("n", 1, {"b", "a"}), rank_on("n", 2, {"a", "b"}),
                                       rank_on("n", 3, {"b", "a", "c"})};
  const Placement placement = place_ranks(ranks);
  EXPECT_EQ(placement.obstacle.find("rank 1"), std::string::npos);
  EXPECT_EQ(placement.devices, (Devices{0, 0, 2}));
}

TEST(Placement, ProcessesDoNotShare) {
  const std::vector<RankGpus> ranks = {rank_on("n", 1, {"a"}), rank_on("n", 2, {"a"})};
  EXPECT_EQ(place_ranks(ranks).obstacle, "rank 1 on n has no GPU of its own: it sees 1, and rank 0 on n has it");
}

TEST(Placement, FewerGpusThanRanks) {
  const std::vector<std::string> all = {"a", "b"};
  const std::vector<RankGpus> ranks = {rank_on("n", 1, all), rank_on("n", 2, all), rank_on("n", 3, all)};
  EXPECT_NE(place_ranks(ranks).obstacle.find("rank 2 on n has no GPU of its own: it sees 2"), std::string::npos);
}

TEST(Placement, ThreadsOfAProcessShare) {
  const std::vector<std::string> all = {"a", "b"};
  const std::vector<RankGpus> ranks(5, rank_on("n", 1, all));
  const Placement placement = place_ranks(ranks);
  EXPECT_EQ(placement.obstacle, "");
  EXPECT_EQ(placement.devices, (Devices{0, 1, 0, 1, 0}));
  EXPECT_TRUE(placement.shared);
}

TEST(Placement, ARankWithoutAGpuIsAnObstacle) {
  std::vector<RankGpus> ranks = {rank_on("n", 1, {"a"}), rank_on("m", 1, {})};
  ranks[1].why_none = "no driver";
  EXPECT_EQ(place_ranks(ranks).obstacle, "rank 1 on m has no GPU: no driver");
}

}  // namespace
}  // namespace ringattn
