// SPDX-License-Identifier: Apache-2.0
// Thousands of random jobs: the plans of all ranks, run together, do exactly what the job asks. A failure prints its
// seed; RINGATTN_TEST_SEED=<seed> with --gtest_filter=<test> replays only that one.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "base/error.hpp"
#include "ops/attention/attention_work.hpp"
#include "tests/attention/ring/plan_simulator.hpp"
#include "tests/attention/ring/random_job.hpp"
#include "tests/support/environment.hpp"

namespace ringattn::testing {
namespace {

// Calls `check` with `count` seeds (ten times as many in long runs), or with the replayed one. Stops at a failure.
void for_seeds(std::uint64_t count, const std::function<void(std::uint64_t)>& check) {
  if (const auto seed = replayed_seed()) return check(*seed);
  for (std::uint64_t seed = 1; seed <= (long_tests() ? 10 * count : count); ++seed) {
    check(seed);
    if (::testing::Test::HasFailure()) return;
  }
}

void expect_promises(const RandomJob& random, const JobLayout& layout, std::uint64_t seed) {
  EXPECT_EQ(broken_promise(random, layout), "") << "RINGATTN_TEST_SEED=" << seed << ": " << random.description();
}

TEST(PlanProperty, SmallJobs) {
  for_seeds(12000, [](std::uint64_t seed) {
    const RandomJob random = random_job(seed, 600, 12);
    expect_promises(random, random.layout(), seed);
  });
}

TEST(PlanProperty, LongerJobs) {
  for_seeds(1000, [](std::uint64_t seed) {
    const RandomJob random = random_job(seed, 12000, 64);
    expect_promises(random, random.layout(), seed);
  });
}

TEST(PlanProperty, ManyRanks) {
  for_seeds(300, [](std::uint64_t seed) {
    const RandomJob random = random_job(seed, 3000, 1024);
    expect_promises(random, random.layout(), seed);
  });
}

TEST(PlanProperty, StatedRuns) {
  for_seeds(5000, [](std::uint64_t seed) {
    const RandomJob random = random_job(seed, 600, 12);
    expect_promises(random, stated_layout(random.job, random.world, seed), seed);
  });
}

// The random jobs come to every case that a plan distinguishes; otherwise the tests above would show little.
TEST(PlanProperty, JobsReachEveryCase) {
  struct {
    int several_blocks, forwarded, pipelined, chain_though_direct, merged, shard_copies, buffer_copies, idle_ranks,
        halo;
  } seen{};
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    const RandomJob random = random_job(seed, 600, 12);
    const JobLayout layout = random.layout();
    const Planner planner(attention_work(random.job), layout, random.kernel, random.machine, random.options);
    if (planner.boundaries().size() > 3) ++seen.several_blocks;
    for (int rank = 0; rank < random.world; ++rank) {
      const Plan plan = planner.plan(rank);
      if (plan.queries.empty()) ++seen.idle_ranks;
      for (const BlockPlan& block : plan.blocks) {
        for (const PlannedMessage& send : block.sends) {
          if (send.parts.size() > 1) ++seen.merged;
          if (send.round > 0 && random.options.route == Route::kDirect) ++seen.chain_though_direct;
          for (const std::int32_t part : send.parts) {
            const bool own = block.parts[static_cast<std::size_t>(part)].owner == rank;
            if (!own) ++seen.forwarded;
            if (own && send.round > 0) ++seen.pipelined;
          }
        }
        for (const RowCopy& copy : block.copies) ++(copy.from_shard ? seen.shard_copies : seen.buffer_copies);
        const std::int64_t rows = block.bytes_received / kv_token_bytes(random.job.spec);
        if (rows > 0 && rows < block.last_token - block.first_token - layout.keys.tokens(rank)) ++seen.halo;
      }
    }
  }
  constexpr int kOften = 100;
  EXPECT_GE(seen.several_blocks, kOften);
  EXPECT_GE(seen.forwarded, kOften);
  EXPECT_GE(seen.pipelined, kOften);
  EXPECT_GE(seen.chain_though_direct, kOften);
  EXPECT_GE(seen.merged, kOften);
  EXPECT_GE(seen.shard_copies, kOften);
  EXPECT_GE(seen.buffer_copies, kOften);
  EXPECT_GE(seen.idle_ranks, kOften);
  EXPECT_GE(seen.halo, kOften);
}

// A limit of a block's tokens is kept, whatever the links are; a block of one tile may be longer.
TEST(PlanProperty, LimitedBlocks) {
  int cut = 0;
  for_seeds(2000, [&](std::uint64_t seed) {
    RandomJob random = random_job(seed, 2000, 12);
    Draw draw(seed);
    random.options.block_tokens = 0;
    random.options.max_block_tokens = draw.size(2000);
    random.options.overlap = draw.chance(70);
    const JobLayout layout = random.layout();
    const auto boundaries =
        block_boundaries(attention_work(random.job), layout, random.kernel, random.machine, random.options);
    for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
      ASSERT_LE(boundaries[i + 1] - boundaries[i],
                std::max<std::int64_t>(random.options.max_block_tokens, random.kernel.key_tile));
    }
    random.options.max_block_tokens = 0;
    const auto free =
        block_boundaries(attention_work(random.job), layout, random.kernel, random.machine, random.options);
    if (boundaries != free) ++cut;
    random.options.max_block_tokens = draw.size(2000);
    expect_promises(random, layout, seed);
  });
  EXPECT_TRUE(replayed_seed() || cut > 100) << cut;
}

// A budget is kept, or refused with an error that names one which is then enough.
TEST(PlanProperty, MemoryBudgets) {
  int refused = 0;
  for_seeds(2000, [&](std::uint64_t seed) {
    RandomJob random = random_job(seed, 2000, 12);
    const JobLayout layout = random.layout();
    Draw draw(seed);
    random.options.fixed_bytes = static_cast<std::size_t>(draw.size(1 << 20));
    random.options.block_tokens = 0;
    random.options.memory_budget = random.options.fixed_bytes / 2 +
                                   static_cast<std::size_t>(draw.size(4 * 2000 * kv_token_bytes(random.job.spec)));
    try {
      block_boundaries(attention_work(random.job), layout, random.kernel, random.machine, random.options);
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(error.code(), ErrorCode::kMemory) << error.what();
      const std::string message = error.what();
      const std::size_t at = message.rfind("). ");
      ASSERT_NE(message.find(" is enough"), std::string::npos) << message;
      char* unit = nullptr;
      const double number = std::strtod(message.c_str() + at + 3, &unit);
      random.options.memory_budget = static_cast<std::size_t>(number * (*unit == 'm' ? 1024.0 * 1024.0 : 1.0));
    }
    expect_promises(random, layout, seed);
  });
  EXPECT_TRUE(replayed_seed() || refused > 100) << refused;
}

}  // namespace
}  // namespace ringattn::testing
