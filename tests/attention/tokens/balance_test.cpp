// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/balance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/tokens/job.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention/block_mask_patterns.hpp"

namespace ringattn {
namespace {

// Pairs of the rank with the most pairs, divided by the mean.
double unevenness(const Layout& queries, const QueryWork& work) {
  double most = 0.0;
  double all = 0.0;
  for (int rank = 0; rank < queries.world(); ++rank) {
    double pairs = 0.0;
    for (const TokenRun& run : queries.runs(rank)) pairs += work(run);
    most = std::max(most, pairs);
    all += pairs;
  }
  return most * queries.world() / all;
}

// Every eighth block of queries sees all keys before it, the others little: the snake gives all of those to one rank.
TEST(BalanceStripes, HeavyOnesGoToTheRankWithTheLeast) {
  Job job{make_spec(Dtype::kBf16, 2, 1, 64, {-1, 0}), {{16384, 16384, 0}, {300, 300, 0}, {4096, 8192, 4096}}};
  const BlockMaskShape shape{128, 128, 1};
  set_block_mask(
      job, std::make_shared<const BlockMask>(make_block_mask(
               shape, masked_sequences(job.batch), [](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
                 const auto own = static_cast<std::int32_t>(place.block);
                 for (std::int32_t b = place.block % 8 == 0 ? 0 : own; b <= own; ++b) blocks.push_back(b);
               })));
  const QueryWork work = query_work(job);
  const LayoutRequest request{LayoutKind::kStriped, 128};
  const JobLayout snake = make_layout(job.batch, work, 4, request, 64, 128);
  const JobLayout balanced = make_layout(job, 4, request, 64, 128);
  EXPECT_GT(unevenness(snake.queries, work), 1.7);
  EXPECT_LT(unevenness(balanced.queries, work), 1.25);
  std::int64_t most = 0;
  std::int64_t least = 1 << 20;
  for (int rank = 0; rank < 4; ++rank) {
    most = std::max(most, balanced.queries.tokens(rank));
    least = std::min(least, balanced.queries.tokens(rank));
    // Keys lie with the queries of the first sequence.
    const auto of_first = [rank](const Layout& layout) {
      std::vector<TokenRun> runs;
      std::ranges::copy_if(layout.runs(rank), std::back_inserter(runs),
                           [](const TokenRun& r) { return r.sequence == 0; });
      return runs;
    };
    EXPECT_EQ(of_first(balanced.queries), of_first(balanced.keys));
  }
  EXPECT_LE(most - least, 300 + 2 * 128);
  // Layouts of other kinds are the caller's wish.
  const LayoutRequest zigzag{LayoutKind::kZigzag, 0};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(std::ranges::equal(make_layout(job, 4, zigzag, 64, 128).queries.runs(rank),
                                   make_layout(job.batch, work, 4, zigzag, 64, 128).queries.runs(rank)));
  }
}

}  // namespace
}  // namespace ringattn
