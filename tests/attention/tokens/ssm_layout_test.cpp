// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/ssm_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "kernels/ssm/ssm.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

TEST(SsmLayout, GivesNeighboursToEachRank) {
  const Layout layout = deal_ssm(std::vector<std::int64_t>{4 * kSuper}, 2);
  EXPECT_EQ(layout.runs(0)[0], (TokenRun{0, 0, 2 * kSuper}));
  EXPECT_EQ(layout.runs(1)[0], (TokenRun{0, 2 * kSuper, 4 * kSuper}));
  // With fewer of them than ranks those that have one are neighbours.
  EXPECT_EQ(deal_ssm(std::vector<std::int64_t>{100}, 8).tokens(0), 100);
  const Layout few = deal_ssm(std::vector<std::int64_t>{3 * kSuper}, 8);
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(few.tokens(rank), rank < 3 ? kSuper : 0) << rank;
}

TEST(SsmLayout, RefusesWhatNeedsTooLargeTables) {
  const auto code = [](std::int64_t sequences, std::int64_t tokens, int world) {
    const std::vector<std::int64_t> lengths(static_cast<std::size_t>(sequences), tokens);
    return error_of([&] { ssm_layout(lengths, {}, world); }).code();
  };
  EXPECT_EQ(code(1, kSuper * (1 << 20) + 1, 1), ErrorCode::kMemory);
  EXPECT_EQ(code((1 << 16) + 1, 1, 64), ErrorCode::kMemory);
  EXPECT_EQ(code(3, kSuper * (1 << 15), 64), ErrorCode::kMemory);
  EXPECT_EQ(ssm_layout(std::vector<std::int64_t>(1 << 10, 1), {}, 64).owners().size(), 1024U);
}

// The most that a rank has, where `ranks` of them have all pieces and each as few as can be: tried one by one.
std::int64_t least_most(const std::vector<std::int64_t>& pieces, std::size_t first, int ranks) {
  if (first == pieces.size()) return 0;
  if (ranks == 0) return std::int64_t{1} << 60;
  std::int64_t best = std::int64_t{1} << 60;
  std::int64_t tokens = 0;
  for (std::size_t end = first + 1; end <= pieces.size(); ++end) {
    tokens += pieces[end - 1];
    if (tokens >= best) break;
    best = std::min(best, std::max(tokens, least_most(pieces, end, ranks - 1)));
  }
  return best;
}

// No rank waits longer than it must, and no rank is empty where there is enough work for all.
TEST(SsmLayout, IsAsEvenAsCanBe) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> lengths(1 + random() % 5);
    std::vector<std::int64_t> pieces;
    for (std::int64_t& length : lengths) {
      length = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>((round % 2 == 0 ? 3 : 1) * kSuper));
      for (std::int64_t begin = 0; begin < length; begin += kSuper) pieces.push_back(std::min(kSuper, length - begin));
    }
    for (int world = 1; world <= 6; ++world) {
      const Layout layout = deal_ssm(lengths, world);
      std::int64_t most = 0;
      for (int rank = 0; rank < world; ++rank) {
        most = std::max(most, layout.tokens(rank));
        const bool has = rank < static_cast<int>(pieces.size());
        EXPECT_EQ(layout.tokens(rank) > 0, has) << rank << " of " << world << " with " << pieces.size() << " pieces";
      }
      EXPECT_EQ(most, least_most(pieces, 0, world)) << world << " ranks";
    }
  }
  // Short sequences between long ones once left rank 1 without any.
  const Layout layout = deal_ssm(std::vector<std::int64_t>{kSuper, 1, 1, 1, kSuper}, 4);
  for (int rank = 0; rank < 4; ++rank) EXPECT_GT(layout.tokens(rank), 0) << rank;
}

// Random batches and worlds: whole super-segments in order, no rank with more than its share and one super-segment.
TEST(SsmLayout, IsEvenAndInOrder) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> lengths(1 + random() % 9);
    std::int64_t total = 0;
    for (std::int64_t& length : lengths) {
      length = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>((round % 3 == 0 ? 40 : 2) * kSuper));
      total += length;
    }
    const int world = 1 + static_cast<int>(random() % (round % 10 == 0 ? 1024 : 9));
    const Layout layout = deal_ssm(lengths, world);  // which checks that each token has one owner
    int owner = 0;
    for (const OwnedRun& run : layout.owners()) {
      EXPECT_GE(run.owner, owner);
      owner = run.owner;
    }
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_LE(layout.tokens(rank), total / world + kSuper + 1);
      for (const TokenRun& run : layout.runs(rank)) EXPECT_EQ(run.begin % kSuper, 0);
    }
  }
}

TEST(SsmLayout, RefusesRunsThatCutASuperSegment) {
  const std::vector<std::int64_t> lengths{2 * kSuper};
  EXPECT_EQ(stated_ssm_layout(lengths, {{{0, kSuper, 2 * kSuper}}, {{0, 0, kSuper}}}).tokens(0), kSuper);
  EXPECT_EQ(error_of([&] {
              stated_ssm_layout(lengths, {{{0, 0, kSuper - 1}}, {{0, kSuper - 1, 2 * kSuper}}});
            }).code(),
            ErrorCode::kUsage);
}

TEST(StateHops, FollowTheSequence) {
  // Sequence 0 goes 1, 0, 1; sequence 1 stays on 0; sequence 2 goes 0, 1.
  const std::vector<std::int64_t> lengths{2 * kSuper + 5, 3, kSuper + 1};
  const Layout layout =
      stated_ssm_layout(lengths, {{{0, kSuper, 2 * kSuper}, {1, 0, 3}, {2, 0, kSuper}},
                                  {{0, 0, kSuper}, {0, 2 * kSuper, 2 * kSuper + 5}, {2, kSuper, kSuper + 1}}});
  const StateHops hops = state_hops(layout);
  EXPECT_EQ(hops.steps, (std::vector<std::vector<int>>{{1, 0, 0}, {0, 2, 1}}));
  ASSERT_EQ(hops.hops.size(), 2U);
  EXPECT_EQ(hops.hops[0], (std::vector<StateHop>{{1, 0, 0, 0}, {0, 1, 2, 2}}));
  EXPECT_EQ(hops.hops[1], (std::vector<StateHop>{{0, 1, 0, 1}}));
  const StateHops back = gradient_hops(layout);
  EXPECT_EQ(back.steps, (std::vector<std::vector<int>>{{1, 0, 1}, {2, 0, 0}}));
  ASSERT_EQ(back.hops.size(), 2U);
  EXPECT_EQ(back.hops[0], (std::vector<StateHop>{{1, 0, 2, 2}, {1, 0, 1, 0}}));
  EXPECT_EQ(back.hops[1], (std::vector<StateHop>{{0, 1, 0, 0}}));
}

TEST(StateHops, SayHowManyStatesARankReceives) {
  const std::vector<std::int64_t> lengths{2 * kSuper + 5, 3, kSuper + 1};
  const StateHops hops = state_hops(
      stated_ssm_layout(lengths, {{{0, kSuper, 2 * kSuper}, {1, 0, 3}, {2, 0, kSuper}},
                                  {{0, 0, kSuper}, {0, 2 * kSuper, 2 * kSuper + 5}, {2, kSuper, kSuper + 1}}}));
  EXPECT_EQ(states_received(hops, 0), 1);
  EXPECT_EQ(states_received(hops, 1), 2);
}

TEST(SsmLayout, LeavesFinalStatesWhereSequencesEnd) {
  const std::vector<std::int64_t> lengths{kSuper + 1, 7, 2 * kSuper, 9};
  const Layout layout = stated_ssm_layout(
      lengths,
      {{{0, 0, kSuper}, {1, 0, 7}, {2, kSuper, 2 * kSuper}}, {{0, kSuper, kSuper + 1}, {2, 0, kSuper}}, {{3, 0, 9}}});
  const Layout states = final_state_layout(layout);
  EXPECT_EQ(states.packed_tokens(0), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(states.packed_tokens(1), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(states.packed_tokens(2), (std::vector<std::int64_t>{3}));
}

TEST(StateOwners, GiveAnEmptySequenceToTheTokenBeforeIt) {
  const std::vector<std::int64_t> lengths{0, kSuper + 1, 0, 0, 7, 0};
  const StateOwners owners =
      state_owners(stated_ssm_layout(lengths, {{{1, kSuper, kSuper + 1}}, {}, {{1, 0, kSuper}}, {{4, 0, 7}}}));
  EXPECT_EQ(owners.initial, (std::vector<int>{2, 2, 0, 0, 3, 3}));
  EXPECT_EQ(owners.final, (std::vector<int>{2, 0, 0, 0, 3, 3}));
  EXPECT_EQ(sequences_of(owners.initial, 0), (std::vector<std::int32_t>{2, 3}));
  EXPECT_EQ(sequences_of(owners.final, 1), (std::vector<std::int32_t>{}));
  const std::vector<std::int64_t> none{0, 0};
  const StateOwners nowhere = state_owners(ssm_layout(none, {}, 3));
  EXPECT_EQ(nowhere.initial, (std::vector<int>{0, 0}));
  EXPECT_EQ(nowhere.final, (std::vector<int>{0, 0}));
}

TEST(StateHops, AreNoneWhereSequencesStayAtHome) {
  EXPECT_TRUE(state_hops(deal_ssm(std::vector<std::int64_t>{10, 10, 10, 10}, 4)).hops.empty());
}

}  // namespace
}  // namespace ringattn::testing
