// SPDX-License-Identifier: Apache-2.0
// Thousands of random jobs: the plans of all ranks, run together, do exactly what the job asks. A failure prints its
// seed; RINGATTN_TEST_SEED=<seed> with --gtest_filter=<test> replays only that one.
#include <gtest/gtest.h>

#include <algorithm>
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

// Jobs in which keys travel to queries, and jobs in which queries travel to keys, too.
class PlanProperty : public ::testing::TestWithParam<bool> {
 protected:
  static RandomJob job(std::uint64_t seed, std::int64_t max_tokens, int max_ranks) {
    return GetParam() ? random_job_of_both_directions(seed, max_tokens, max_ranks)
                      : random_job(seed, max_tokens, max_ranks);
  }
  // There are fewer jobs of both directions, as their plans take longer to check.
  static std::uint64_t count(std::uint64_t of_one_direction) {
    return GetParam() ? of_one_direction / 4 : of_one_direction;
  }
};

INSTANTIATE_TEST_SUITE_P(, PlanProperty, ::testing::Bool(),
                         [](const auto& directions) { return directions.param ? "BothDirections" : "OneDirection"; });

TEST_P(PlanProperty, SmallJobs) {
  for_seeds(count(12000), [](std::uint64_t seed) {
    const RandomJob random = job(seed, 600, 12);
    expect_promises(random, random.layout(), seed);
  });
}

TEST_P(PlanProperty, LongerJobs) {
  for_seeds(count(500), [](std::uint64_t seed) {
    const RandomJob random = job(seed, 12000, 64);
    expect_promises(random, random.layout(), seed);
  });
}

TEST_P(PlanProperty, ManyRanks) {
  for_seeds(count(300), [](std::uint64_t seed) {
    const RandomJob random = job(seed, 3000, GetParam() ? 256 : 1024);
    expect_promises(random, random.layout(), seed);
  });
}

TEST_P(PlanProperty, StatedRuns) {
  for_seeds(count(5000), [](std::uint64_t seed) {
    const RandomJob random = job(seed, 600, 12);
    expect_promises(random, stated_layout(random.job, random.world, seed), seed);
  });
}

// The random jobs come to every case that a plan distinguishes; otherwise the tests above would show little.
TEST(PlanPropertyCases, AreReached) {
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

TEST(PlanPropertyCases, AreReachedInBothDirections) {
  struct {
    int negative_offset, odd_offset, incomplete_first_tile, before_first_key, after_last_key, only_queries, only_keys,
        halo, assembled, forwarded, shared_message;
  } seen{};
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    const RandomJob random = random_job_of_both_directions(seed, 600, 12);
    for (const Sequence& s : random.job.batch.sequences) {
      if (s.q_len == 0 || s.k_len == 0) continue;
      if (s.q_offset < 0) ++seen.negative_offset;
      if (s.q_offset % 2 != 0) ++seen.odd_offset;
      if (s.q_offset % random.kernel.query_tile != 0) ++seen.incomplete_first_tile;
      if (s.q_offset + s.q_len <= 0) ++seen.before_first_key;
      if (s.q_offset >= s.k_len) ++seen.after_last_key;
    }
    const JobLayout layout = random.layout();
    const Planner planner(random.work(), layout, random.kernel, random.machine, random.options);
    const std::int64_t query_bytes = token_bytes(random.query_streams, /*queries=*/true);
    for (int rank = 0; rank < random.world; ++rank) {
      const Plan plan = planner.plan(rank);
      for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
        const BlockPlan& keys = plan.blocks[b];
        const BlockPlan& queries = plan.to_keys->blocks[b];
        const std::int64_t k_tokens = keys.last_token - keys.first_token;
        const std::int64_t q_tokens = queries.last_token - queries.first_token;
        if (k_tokens == 0 && q_tokens > 0) ++seen.only_queries;
        if (k_tokens > 0 && q_tokens == 0) ++seen.only_keys;
        const std::int64_t rows = queries.bytes_received / query_bytes;
        if (rows > 0 && rows < q_tokens - layout.queries.tokens(rank)) ++seen.halo;
        if (!queries.copies.empty()) ++seen.assembled;
        for (const PlannedMessage& send : queries.sends) {
          const MessagePart& first = queries.parts[static_cast<std::size_t>(send.parts[0])];
          if (first.owner != rank) ++seen.forwarded;
          const bool shared = std::ranges::any_of(keys.sends, [&](const PlannedMessage& other) {
            return other.peer == send.peer && other.round == send.round;
          });
          if (shared) ++seen.shared_message;
        }
      }
    }
  }
  constexpr int kOften = 100;
  EXPECT_GE(seen.negative_offset, kOften);
  EXPECT_GE(seen.odd_offset, kOften);
  EXPECT_GE(seen.incomplete_first_tile, kOften);
  EXPECT_GE(seen.before_first_key, kOften);
  EXPECT_GE(seen.after_last_key, kOften);
  EXPECT_GE(seen.only_queries, kOften);
  EXPECT_GE(seen.only_keys, kOften);
  EXPECT_GE(seen.halo, kOften);
  EXPECT_GE(seen.assembled, kOften);
  EXPECT_GE(seen.forwarded, kOften);
  EXPECT_GE(seen.shared_message, kOften);
}

// A limit of a block's tokens is kept, whatever the links are; a block of one tile may be longer.
TEST_P(PlanProperty, LimitedBlocks) {
  int cut = 0;
  for_seeds(count(2000), [&](std::uint64_t seed) {
    RandomJob random = job(seed, 2000, 12);
    Draw draw(seed);
    random.options.block_tokens = 0;
    random.options.max_block_tokens = draw.size(2000);
    random.options.overlap = draw.chance(70);
    const JobLayout layout = random.layout();
    const auto boundaries = block_boundaries(random.work(), layout, random.kernel, random.machine, random.options);
    for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
      ASSERT_LE(boundaries[i + 1] - boundaries[i],
                std::max<std::int64_t>(random.options.max_block_tokens, random.kernel.key_tile));
    }
    random.options.max_block_tokens = 0;
    const auto free = block_boundaries(random.work(), layout, random.kernel, random.machine, random.options);
    if (boundaries != free) ++cut;
    random.options.max_block_tokens = draw.size(2000);
    expect_promises(random, layout, seed);
  });
  EXPECT_TRUE(replayed_seed() || cut > 50) << cut;
}

// A budget is kept, or refused with an error that names one which is then enough.
TEST_P(PlanProperty, MemoryBudgets) {
  int refused = 0;
  for_seeds(count(2000), [&](std::uint64_t seed) {
    RandomJob random = job(seed, 2000, 12);
    const JobLayout layout = random.layout();
    Draw draw(seed);
    random.options.fixed_bytes = static_cast<std::size_t>(draw.size(1 << 20));
    random.options.block_tokens = 0;
    random.options.memory_budget =
        random.options.fixed_bytes / 2 +
        static_cast<std::size_t>(
            draw.size(4 * 2000 * (token_bytes(random.work().streams) + token_bytes(random.query_streams, true))));
    try {
      block_boundaries(random.work(), layout, random.kernel, random.machine, random.options);
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
  EXPECT_TRUE(replayed_seed() || refused > 50) << refused;
}

}  // namespace
}  // namespace ringattn::testing
