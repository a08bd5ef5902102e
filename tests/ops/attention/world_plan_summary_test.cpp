// SPDX-License-Identifier: Apache-2.0
// What all ranks of a world do together is what the plans of each say.
#include "ops/attention/world_plan_summary.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "attention/tokens/cost.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::testing {
namespace {

class WorldPlanSummaries : public ::testing::Test {
 protected:
  WorldPlanSummaries() {
    const AttentionChoice choice = choose_kernel(job_.spec, KernelRequest{"cpu", "auto"});
    backend_ = choice.row->make_backend({1, kNoDevice});
    kernel_ = choice.row->make_kernel(job_.spec, *backend_);
    options_.block_tokens = 2048;
  }

  WorldPlanSummary forecast(int world) const {
    return summarize_world_plan(ring_job(job_, options_, *kernel_, world), options_, Route::kDirect, world);
  }

  const Job job_{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {{{8192, 8192, 0}, {1000, 3000, 2000}}}};
  Options options_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<AttentionKernel> kernel_;
};

TEST_F(WorldPlanSummaries, AreTheSumsAndTheMostOfTheRanksPlans) {
  for (const int world : {1, 2, 5}) {
    const WorldPlanSummary all = forecast(world);
    EXPECT_EQ(all.world(), world);
    EXPECT_EQ(all.q_tokens, 9192);
    double flops = 0.0;
    std::int64_t bytes = 0;
    std::int64_t most_bytes = 0;
    std::size_t memory = 0;
    double seconds = 0.0;
    for (int rank = 0; rank < world; ++rank) {
      const PlanSummary one = ringattn::summarize_plan(job_, options_, *kernel_, Route::kDirect, world, rank);
      EXPECT_EQ(one.plan.blocks.size(), all.blocks.size());
      EXPECT_EQ(all.rank_flops[static_cast<std::size_t>(rank)], one.plan.flops());
      flops += one.plan.flops();
      bytes += one.plan.bytes_received();
      most_bytes = std::max(most_bytes, one.plan.bytes_received());
      memory = std::max(memory, one.plan.memory_bytes);
      seconds = std::max(seconds, one.time_estimate.seconds);
    }
    EXPECT_DOUBLE_EQ(all.flops(), flops);
    EXPECT_NEAR(all.flops() / job_flops(job_), 1.0, 1e-9);
    EXPECT_EQ(all.bytes_received, bytes);
    EXPECT_EQ(all.max_bytes_received, most_bytes);
    EXPECT_EQ(all.bytes_received > 0, world > 1);
    EXPECT_EQ(all.max_memory, memory);
    EXPECT_EQ(all.seconds, seconds);
    EXPECT_DOUBLE_EQ(all.flops_per_second_per_rank(), flops / seconds / world);
  }
}

TEST_F(WorldPlanSummaries, BlocksFollowEachOtherAndAddUp) {
  const WorldPlanSummary all = forecast(3);
  ASSERT_GT(all.blocks.size(), 2U);
  double flops = 0.0;
  std::int64_t bytes = 0;
  for (std::size_t b = 0; b < all.blocks.size(); ++b) {
    const BlockPlanSummary& block = all.blocks[b];
    EXPECT_TRUE(b == 0 || block.first_token > all.blocks[b - 1].first_token) << b;
    EXPECT_LE(block.max_flops, block.flops);
    EXPECT_LE(block.max_bytes_received, block.bytes_received);
    EXPECT_GE(block.balance(3), 1.0);
    flops += block.flops;
    bytes += block.bytes_received;
  }
  EXPECT_NEAR(flops / all.flops(), 1.0, 1e-9);
  EXPECT_EQ(bytes, all.bytes_received);
}

// With two ranks, the one with the second half of a causal sequence has three quarters of its pairs.
TEST_F(WorldPlanSummaries, BalanceIsTheMostOverTheMean) {
  options_.layout.kind = LayoutKind::kContiguous;
  const Job job{job_.spec, uniform_batch(1, 8192, 8192)};
  const RingJob ring = ring_job(job, options_, *kernel_, 2);
  EXPECT_NEAR(summarize_world_plan(ring, options_, Route::kDirect, 2).balance(), 1.5, 1e-3);
  EXPECT_EQ(forecast(1).balance(), 1.0);
  WorldPlanSummary nothing{0, forecast(1).layout};
  nothing.rank_flops = {0.0, 0.0};
  EXPECT_EQ(nothing.balance(), 1.0);
  EXPECT_EQ(nothing.flops_per_second_per_rank(), 0.0);
  EXPECT_EQ(BlockPlanSummary().balance(4), 1.0);
}

}  // namespace
}  // namespace ringattn::testing
