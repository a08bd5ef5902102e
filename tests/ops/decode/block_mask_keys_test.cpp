// SPDX-License-Identifier: Apache-2.0
// How many keys ranks attend to by their block mask, and that work is dealt by that.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "ops/decode/keys_per_mask_row.hpp"

namespace ringattn {
namespace {

constexpr int kBlock = 128;

// Steps of one row, whose mask row h of sequence s names `listed` blocks, and the row's own.
Job job_of(const std::vector<std::int64_t>& lengths, const std::vector<std::vector<int>>& listed) {
  Job job;
  const auto heads = static_cast<int>(listed[0].size());
  job.spec = make_spec(Dtype::kBf16, 2 * heads, heads, 64, {-1, 0});
  for (const std::int64_t length : lengths) job.batch.sequences.push_back({1, length, length - 1});
  const BlockMaskShape shape{kBlock, kBlock, heads};
  const auto make = [&](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
    blocks.resize(static_cast<std::size_t>(listed[place.sequence][static_cast<std::size_t>(place.head)]));
    std::iota(blocks.begin(), blocks.end(), 0);
    blocks.push_back(static_cast<std::int32_t>(place.blocks - 1));
  };
  set_block_mask(job, std::make_shared<const BlockMask>(make_block_mask(shape, masked_sequences(job.batch), make)));
  return job;
}

std::int64_t most(const Job& job, const DecodeDeal& deal) {
  std::int64_t keys = 0;
  for (int rank = 0; rank < deal.ranks(); ++rank) {
    keys = std::max(keys, attended_keys(keys_per_mask_row(job), job, deal, rank));
  }
  return keys;
}

DecodeDeal dealt(const Job& job, int ranks) {
  return deal_decode(job.spec, false, ranks, [&](const DecodeDeal& deal) { return most(job, deal); });
}

TEST(BlockMaskKeys, AreThoseOfBlocksAndTheRowsOwn) {
  const Job job = job_of({10 * kBlock + 5, 100}, {{3, 0}, {0, 0}});
  EXPECT_EQ(keys_per_mask_row(job), (std::vector<std::int64_t>{3 * kBlock + 5, 5, 100, 100}));
  EXPECT_EQ(attended_keys(keys_per_mask_row(job), job, {1, 1, 1}, 0), 3 * kBlock + 210);
  EXPECT_EQ(attended_keys(keys_per_mask_row(job), job, {2, 1, 1}, 1), 200);
  EXPECT_EQ(attended_keys(keys_per_mask_row(job), job, {1, 2, 1}, 0), 3 * kBlock + 105);
  EXPECT_EQ(attended_keys(keys_per_mask_row(job), job, {2, 2, 1}, 3), 100);
  Job without = job;
  without.block_mask = nullptr;
  EXPECT_TRUE(keys_per_mask_row(without).empty());
  Job others{job.spec, {{1, 100, 99}}};
  others.block_mask = job.block_mask;
  EXPECT_TRUE(keys_per_mask_row(others).empty());
}

// Many sequences, of which one has nearly all of the listed keys: as many for each rank would leave it to one of them.
TEST(BlockMaskKeys, RanksAreDealtAsMany) {
  std::vector<std::int64_t> lengths(16, 40 * kBlock);
  std::vector<std::vector<int>> listed(16, {1, 1, 1, 1});
  const Job even = job_of(lengths, listed);
  EXPECT_EQ(dealt(even, 4), (DecodeDeal{4, 1, 1}));
  EXPECT_EQ(most(even, {4, 1, 1}), 4 * 4 * 2 * kBlock);
  listed[3] = {38, 38, 38, 38};
  const Job uneven = job_of(lengths, listed);
  EXPECT_EQ(dealt(uneven, 4), (DecodeDeal{1, 4, 1}));
  EXPECT_EQ(most(uneven, {1, 4, 1}), (39 + 15 * 2) * kBlock);
  EXPECT_EQ(most(uneven, {4, 1, 1}), 4 * (39 + 3 * 2) * kBlock);
  // One head has nearly all: no way is even, and whole sequences are as good as any.
  listed.assign(16, {38, 0, 0, 0});
  EXPECT_EQ(dealt(job_of(lengths, listed), 4), (DecodeDeal{4, 1, 1}));
}

}  // namespace
}  // namespace ringattn
