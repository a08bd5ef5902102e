// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/batch.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "attention/tokens/layout.hpp"
#include "base/error.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

using Numbers = std::vector<std::int64_t>;

TEST(BatchLengths, CountEachSideByItself) {
  const Batch batch{{3, 5, 2}, {0, 4, 0}, {7, 0, 0}};
  EXPECT_EQ(batch.q_tokens(), 10);
  EXPECT_EQ(batch.k_tokens(), 9);
  EXPECT_EQ(batch.q_lengths(), (Numbers{3, 0, 7}));
  EXPECT_EQ(batch.k_lengths(), (Numbers{5, 4, 0}));
  EXPECT_EQ(batch.cu_q(), (Numbers{0, 3, 3, 10}));
  EXPECT_EQ(batch.cu_k(), (Numbers{0, 5, 9, 9}));
  EXPECT_EQ(Batch().cu_q(), (Numbers{0}));
}

TEST(UniformBatch, AlignsQueriesToTheEnd) {
  EXPECT_EQ(uniform_batch(2, 3, 10), (Batch{{3, 10, 7}, {3, 10, 7}}));
  EXPECT_EQ(uniform_batch(0, 3, 10), Batch());
}

TEST(SequenceList, HoldsEqualSequencesAsTheirNumber) {
  const std::int64_t many = std::int64_t{1} << 40;
  const Batch batch = uniform_batch(many, 3, 5);
  EXPECT_EQ(batch.sequences.size(), static_cast<std::size_t>(many));
  EXPECT_EQ(batch.sequences.distinct(), 1U);
  EXPECT_EQ(batch.sequences[static_cast<std::size_t>(many) - 1], (Sequence{3, 5, 2}));
  EXPECT_EQ(batch.sequences, uniform_batch(many, 3, 5).sequences);
  EXPECT_NE(batch.sequences, uniform_batch(many, 3, 4).sequences);
  EXPECT_EQ(uniform_batch(2, 3, 5).sequences, (std::vector<Sequence>{{3, 5, 2}, {3, 5, 2}}));
  EXPECT_EQ(batch.sequences.with_offset(-1)[7], (Sequence{3, 5, -1}));
  EXPECT_EQ(testing::error_of([&] { check_batch(batch); }).code(), ErrorCode::kUsage);
  EXPECT_NO_THROW(check_batch(uniform_batch(kMaxSequences, 0, 0)));
}

TEST(SequenceList, GrowsWithoutItsCopies) {
  SequenceList list = uniform_batch(2, 1, 1).sequences;
  list.push_back({7, 8, 9});
  const SequenceList copy = list;
  list.push_back({4, 4, 0});
  EXPECT_EQ(copy, (std::vector<Sequence>{{1, 1, 0}, {1, 1, 0}, {7, 8, 9}}));
  EXPECT_EQ(list, (std::vector<Sequence>{{1, 1, 0}, {1, 1, 0}, {7, 8, 9}, {4, 4, 0}}));
  EXPECT_EQ(list.with_offset(5)[3], (Sequence{4, 4, 5}));
}

// Tiles of 64 positions: queries at 70 … 169 begin 6 positions after a tile does, those at −1 … 98 begin 63 after it.
TEST(TransposedBatch, CountsPositionsFromTheFirstTileOfQueries) {
  const Batch batch{{100, 50, 70}, {100, 50, -1}, {10, 20, 128}, {0, 20, 70}};
  const Batch expected{{50, 106, -64, 6}, {50, 163, 64, 63}, {20, 10, -128, 0}, {20, 0, 0, 0}};
  const Batch result = transposed(batch, 64);
  EXPECT_EQ(result, expected);
  EXPECT_EQ(result.q_lengths(), batch.k_lengths());
  EXPECT_EQ(result.k_lengths(), batch.q_lengths());
  EXPECT_EQ(result.cu_k(), batch.cu_q());
  EXPECT_EQ(transposed(Batch(), 64), Batch());
}

TEST(TransposedBatch, HoldsEqualSequencesAsTheirNumber) {
  const std::int64_t many = std::int64_t{1} << 40;
  const Batch result = transposed(uniform_batch(many, 3, 73), 64);
  EXPECT_EQ(result.sequences.size(), static_cast<std::size_t>(many));
  EXPECT_EQ(result.sequences[7], (Sequence{73, 9, -64, 6}));
}

TEST(PackedBatch, TakesOffsetsOrAligns) {
  const Numbers cu_q = {0, 2, 2, 6};
  const Numbers cu_k = {0, 5, 9, 10};
  EXPECT_EQ(packed_batch(cu_q, cu_k, {}), (Batch{{2, 5, 3}, {0, 4, 4}, {4, 1, -3}}));
  EXPECT_EQ(packed_batch(cu_q, cu_k, Numbers{1, 2, 3}), (Batch{{2, 5, 1}, {0, 4, 2}, {4, 1, 3}}));
}

TEST(PackedBatch, RefusesListsThatDoNotFit) {
  const auto refused = [](const Numbers& cu_q, const Numbers& cu_k, const Numbers& offsets) {
    return error_of([&] { packed_batch(cu_q, cu_k, offsets); }).code() == ErrorCode::kFile;
  };
  EXPECT_TRUE(refused({0, 5, 3}, {0, 5, 6}, {}));  // descends
  EXPECT_TRUE(refused({1, 5}, {0, 5}, {}));        // does not begin at 0
  EXPECT_TRUE(refused({0, 5}, {0, 5, 6}, {}));     // other numbers of sequences
  EXPECT_TRUE(refused({0, 5}, {0, 5}, {1, 2}));    // an offset too many
}

TEST(CheckBatch, RefusesWhatNoMachineHolds) {
  constexpr std::int64_t kFar = std::int64_t{1} << 60;
  EXPECT_NO_THROW(check_batch({{kFar, kFar, -kFar}}));
  for (const Sequence& bad : {Sequence{-1, 1, 0}, {1, -1, 0}, {kFar + 1, 1, 0}, {1, 1, kFar + 1}, {1, 1, -kFar - 1}}) {
    EXPECT_EQ(error_of([&] { check_batch({{1, 1, 0}, bad}); }).code(), ErrorCode::kUsage);
  }
}

// A layout depends only on work, so the batch of any op can be dealt. Where every token is equal work, the long
// sequences are too much for one rank and are dealt to both. Where nearly all the work is said to be in the short one,
// only that is split, and each of the others lives whole on one rank.
TEST(Layouts, DealABatchByTheWorkTheyAreTold) {
  const Batch batch{{100, 100, 0}, {50, 50, 0}, {100, 100, 0}};
  const auto ranks_of = [&](const QueryWork& work) {
    const JobLayout layout = make_layout(batch, work, 2, {LayoutKind::kStriped, 34}, 1, 34);
    std::vector<int> ranks(batch.sequences.size());
    for (const OwnedRun& run : layout.keys.owners()) {
      const auto& cu = layout.keys.cu();
      const auto sequence = std::upper_bound(cu.begin(), cu.end(), run.token) - cu.begin() - 1;
      ranks[static_cast<std::size_t>(sequence)] |= 1 << run.owner;
    }
    return ranks;
  };
  const auto even = ranks_of([](const TokenRun& run) { return 1000.0 * static_cast<double>(run.tokens()); });
  EXPECT_EQ(even[0], 3);
  EXPECT_EQ(even[2], 3);
  const auto skewed = ranks_of([](const TokenRun& run) { return run.sequence == 1 ? 1e9 : 0.0; });
  EXPECT_EQ(skewed[1], 3);
  EXPECT_NE(skewed[0], 3);
  EXPECT_NE(skewed[2], 3);
}

}  // namespace
}  // namespace ringattn::testing
