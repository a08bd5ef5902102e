// SPDX-License-Identifier: Apache-2.0
// What a plan takes of a rank's memory, and what it does with a budget.
#include <gtest/gtest.h>

#include "ops/attention/attention_work.hpp"
#include "tests/attention/ring/plan_cases.hpp"

namespace ringattn::testing {
namespace {

TEST(PlanMemory, ABudgetBoundsTheBuffers) {
  const Job job = causal_job(262144);
  const JobLayout layout = layout_of(job, 4);
  PlanOptions options;
  options.fixed_bytes = 1 << 20;
  options.memory_budget = options.fixed_bytes + 2 * 4096 * static_cast<std::size_t>(kv_token_bytes(job.spec));
  const Planner planner(attention_work(job), layout, kKernel, {}, options);
  for (int rank = 0; rank < 4; ++rank) {
    const Plan plan = planner.plan(rank);
    EXPECT_LE(plan.memory_bytes, options.memory_budget);
    EXPECT_GT(plan.memory_bytes, options.memory_budget * 9 / 10);  // and is used
  }
}

TEST(PlanMemory, ABudgetTooSmallSaysWhatWouldFit) {
  const Job job = causal_job(65536);
  const JobLayout layout = layout_of(job, 4);
  ASSERT_EQ(kv_token_bytes(job.spec), 1024);
  PlanOptions options;
  options.fixed_bytes = 100 << 20;
  const auto plan = [&] { block_boundaries(attention_work(job), layout, kKernel, {}, options); };
  options.memory_budget = 50 << 20;
  EXPECT_EQ(
      refusal(plan, ErrorCode::kMemory),
      "a memory budget of 52428800 bytes a rank is too small (104857600 for shards, state and scratch, and 262144 "
      "for two blocks of one key tile). memory = 101m is enough; with more ranks, shards and state are smaller.");
  options.memory_budget = 110 << 20;
  options.block_tokens = 16384;
  EXPECT_EQ(
      refusal(plan, ErrorCode::kMemory),
      "blocks of 16384 tokens don't fit into the memory budget (10485760 bytes of 115343360 are left for two of them, "
      "at 1024 bytes a token). block = 4096 would fit.");
  options.block_tokens = 4096;
  EXPECT_EQ(refusal(plan, ErrorCode::kMemory), "");
}

// The attention state outlives a block only where another block follows or the caller wants the state.
TEST(PlanMemory, OneBlockAloneKeepsNoState) {
  const Job job = causal_job(4096);
  PlanOptions options;
  options.fixed_bytes = 1000;
  options.state_bytes = 100'000;
  for (const int world : {1, 4}) {
    const JobLayout layout = layout_of(job, world);
    const auto expect = [&](bool keeps_state, std::size_t blocks) {
      for (int rank = 0; rank < world; ++rank) {
        const Plan plan = make_plan(attention_work(job), layout, kKernel, {}, options, rank);
        EXPECT_EQ(plan.blocks.size(), blocks);
        EXPECT_EQ(plan.keeps_state, keeps_state);
        EXPECT_EQ(plan.memory_bytes, 1000 + (keeps_state ? 100'000 : 0) + 2 * plan.block_buffer_bytes);
      }
    };
    options.state_out = false;
    options.block_tokens = 4096;
    expect(false, 1);
    options.block_tokens = 1 << 20;
    expect(false, 1);
    options.block_tokens = 2048;
    expect(true, 2);
    options.state_out = true;
    expect(true, 2);
    options.block_tokens = 4096;
    expect(true, 1);
  }
}

// Several ranks between which nothing moves have one block each.
TEST(PlanMemory, RanksWithWholeSequencesKeepNoState) {
  const Job job = causal_job(500, 64);
  const JobLayout layout = layout_of(job, 8);
  PlanOptions options;
  options.fixed_bytes = 1000;
  options.state_bytes = 100'000;
  options.memory_budget = 1000;
  for (int rank = 0; rank < 8; ++rank)
    EXPECT_EQ(make_plan(attention_work(job), layout, kKernel, {}, options, rank).memory_bytes, 1000U);
}

TEST(PlanMemory, ABudgetCountsTheStateWhereItIsKept) {
  const Job job = causal_job(4096);
  constexpr std::size_t kFixed = 10 << 20;
  constexpr std::size_t kState = 7 << 20;
  PlanOptions options;
  options.fixed_bytes = kFixed;
  options.state_bytes = kState;
  const auto answer = [&](int world, std::int64_t block_tokens, std::size_t budget) {
    options.block_tokens = block_tokens;
    options.memory_budget = budget;
    const JobLayout layout = layout_of(job, world);
    return refusal(
        [&] {
          const Plan plan = make_plan(attention_work(job), layout, kKernel, {}, options, 0);
          EXPECT_LE(plan.memory_bytes, budget);
        },
        ErrorCode::kMemory);
  };
  // One rank in one block, by itself or because it was asked for.
  for (const auto& [block_tokens, blocks] : {std::pair(0, "one key tile"), {4096, "4096 tokens"}}) {
    EXPECT_EQ(answer(1, block_tokens, kFixed), "");
    EXPECT_EQ(answer(1, block_tokens, kFixed - 1),
              "a memory budget of 10485759 bytes a rank is too small (10485760 for shards, state and scratch, and 0 "
              "for two blocks of " +
                  std::string(blocks) + "). memory = 10m is enough; with more ranks, shards and state are smaller.");
  }
  EXPECT_EQ(answer(1, 1 << 20, kFixed), "");
  // In two blocks.
  EXPECT_NE(answer(1, 2048, kFixed), "");
  EXPECT_NE(answer(1, 2048, kFixed + kState - 1), "");
  EXPECT_EQ(answer(1, 2048, kFixed + kState), "");
  // Ranks that need each other's keys size their blocks to fit the budget, with the state.
  const auto two_tiles = static_cast<std::size_t>(2 * 128 * kv_token_bytes(job.spec));
  EXPECT_NE(answer(4, 0, kFixed + two_tiles), "");
  EXPECT_EQ(answer(4, 0, kFixed + kState + two_tiles), "");
  const auto everything = static_cast<std::size_t>(2 * 4096 * kv_token_bytes(job.spec));
  EXPECT_EQ(answer(4, 4096, kFixed + everything), "");
  EXPECT_NE(answer(4, 1024, kFixed + everything / 4), "");
  // What is named for blocks of a stated size is enough for blocks of that size.
  EXPECT_EQ(answer(4, 1024, kFixed),
            "a memory budget of 10485760 bytes a rank is too small (17825792 for shards, state and scratch, and "
            "1572864 for two blocks of 1024 tokens). memory = 19m is enough; with more ranks, shards and state are "
            "smaller.");
  const std::size_t received = everything / 4 / 4 * 3;  // a rank has a quarter itself
  EXPECT_EQ(answer(4, 1024, kFixed + kState + received), "");
  EXPECT_NE(answer(4, 1024, kFixed + kState + received - 1), "");
  // A job that returns the state must have memory for it.
  options.state_out = true;
  EXPECT_EQ(answer(1, 0, kFixed),
            "a memory budget of 10485760 bytes a rank is too small (17825792 for shards, state and scratch, and 0 for "
            "two blocks of one key tile). memory = 17m is enough; with more ranks, shards and state are smaller.");
  EXPECT_EQ(answer(1, 0, kFixed + kState), "");
}

}  // namespace
}  // namespace ringattn::testing
