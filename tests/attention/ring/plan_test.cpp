// SPDX-License-Identifier: Apache-2.0
// Plans of known jobs: what moves, how it is balanced, what is refused.
#include "attention/ring/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "attention/ring/blocks.hpp"
#include "base/error.hpp"
#include "ops/attention/attention_work.hpp"
#include "tests/attention/ring/plan_cases.hpp"

namespace ringattn::testing {
namespace {

TEST(Plan, OneRankComputesEverythingInOneBlockInPlace) {
  const Job job = causal_job(1000, 3);
  const JobLayout layout = layout_of(job, 1);
  const Plan plan = make_plan(attention_work(job), layout, kKernel, {}, {}, 0);
  ASSERT_EQ(plan.blocks.size(), 1U);
  EXPECT_TRUE(plan.blocks[0].parts.empty());
  EXPECT_EQ(plan.buffer_rows, 0);
  EXPECT_EQ(plan.blocks[0].tiles.size(), 3U * 8U);
  for (const PageRun& tile : plan.blocks[0].tiles) EXPECT_EQ(tile.source, kOwnShard);
  EXPECT_EQ(plan.flops(), job_flops(job));
}

TEST(Plan, AJobOfNothingHasOneBlockOfNothing) {
  for (const auto& sequences : {std::vector<Sequence>{}, std::vector<Sequence>{{0, 0, 0}}, {{5, 0, 0}}}) {
    Job job = causal_job(1);
    job.batch.sequences = sequences;
    const JobLayout layout = layout_of(job, 4);
    for (const std::int64_t block : {0, 128}) {
      PlanOptions options;
      options.block_tokens = block;
      const Planner planner(attention_work(job), layout, kKernel, {}, options);
      EXPECT_EQ(planner.boundaries(), (std::vector<std::int64_t>{0, 0}));
      EXPECT_TRUE(planner.plan(0).blocks.at(0).key_runs.empty());
    }
  }
}

// 64k tokens on 8 ranks: every block is equal work for all ranks, so no rank waits.
TEST(Plan, StripedCausalIsBalancedBlockByBlock) {
  constexpr double kBlockTolerance = 0.02;
  constexpr double kTotalTolerance = 0.005;
  const Job job = causal_job(65536);
  const JobLayout layout = layout_of(job, 8);
  for (const std::int64_t block_tokens : {std::int64_t{0}, std::int64_t{8192}}) {
    PlanOptions options;
    options.block_tokens = block_tokens;
    const Planner planner(attention_work(job), layout, kKernel, {}, options);
    ASSERT_GE(planner.boundaries().size(), 3U);
    std::vector<Plan> plans;
    for (int rank = 0; rank < 8; ++rank) plans.push_back(planner.plan(rank));
    for (std::size_t block = 0; block < plans[0].blocks.size(); ++block) {
      double mean = 0.0;
      for (const Plan& plan : plans) mean += plan.blocks[block].flops / 8;
      for (const Plan& plan : plans) {
        EXPECT_NEAR(plan.blocks[block].flops, mean, kBlockTolerance * mean) << "block " << block;
      }
    }
    for (const Plan& plan : plans) EXPECT_NEAR(plan.flops(), job_flops(job) / 8, kTotalTolerance * job_flops(job) / 8);
  }
}

// A block costs each rank as much as a step of the classic ring: all of it but the rank's own share.
TEST(Plan, ABlockCostsAStepOfTheClassicRing) {
  Job job = causal_job(8192);
  job.spec.mask = {-1, -1};
  const JobLayout layout = layout_of(job, 4);
  for (const Route route : {Route::kChain, Route::kDirect}) {
    PlanOptions options;
    options.route = route;
    options.block_tokens = 2048;
    const Planner planner(attention_work(job), layout, kKernel, {}, options);
    for (int rank = 0; rank < 4; ++rank) {
      const Plan plan = planner.plan(rank);
      ASSERT_EQ(plan.blocks.size(), 4U);
      for (const BlockPlan& block : plan.blocks) {
        EXPECT_EQ(block.bytes_received, 3 * 512 * kv_token_bytes(job.spec));
        EXPECT_EQ(block.bytes_sent, 3 * 512 * kv_token_bytes(job.spec));
        EXPECT_EQ(block.parts.size(), 4U);
        EXPECT_EQ(block.buffer_rows, 3 * 512);
        ASSERT_EQ(block.receives.size(), 3U);
        for (int step = 0; step < 3; ++step) {  // from the neighbour, or from the neighbour first
          const PlannedMessage& receive = block.receives[static_cast<std::size_t>(step)];
          EXPECT_EQ(receive.round, route == Route::kChain ? step : 0);
          EXPECT_EQ(receive.peer, (rank + 3 - (route == Route::kChain ? 0 : step)) % 4);
        }
      }
    }
  }
}

TEST(Plan, ChecksumsAreCounted) {
  const Job job = causal_job(4096);
  const JobLayout layout = layout_of(job, 4);
  PlanOptions options;
  options.block_tokens = 4096;
  const Plan without = make_plan(attention_work(job), layout, kKernel, {}, options, 1);
  options.checksum = true;
  const Plan with = make_plan(attention_work(job), layout, kKernel, {}, options, 1);
  std::int64_t received = 0;
  for (const PlannedMessage& message : with.blocks[0].receives)
    received += static_cast<std::int64_t>(message.parts.size());
  ASSERT_GT(received, 0);
  EXPECT_EQ(with.bytes_received() - without.bytes_received(), received * kChecksumBytes);
}

// Sliding window on contiguous shards: each rank receives the `left` tokens before its shard, in whole tiles.
TEST(Plan, ASlidingWindowMovesOnlyTheHalo) {
  Job job = causal_job(32768);
  job.spec.mask = {1023, 0};
  const JobLayout layout = layout_of(job, 8, LayoutKind::kContiguous);
  for (const std::int64_t block_tokens : {0, 128, 1000, 32768}) {
    PlanOptions options;
    options.block_tokens = block_tokens;
    const Planner planner(attention_work(job), layout, kKernel, {}, options);
    for (int rank = 0; rank < 8; ++rank) {
      EXPECT_EQ(planner.plan(rank).bytes_received(), rank == 0 ? 0 : 1024 * kv_token_bytes(job.spec));
      EXPECT_EQ(planner.plan(rank).bytes_sent(), rank == 7 ? 0 : 1024 * kv_token_bytes(job.spec));
    }
  }
}

TEST(Plan, WholeSequencesMoveNothing) {
  const Job job = causal_job(500, 64);
  const JobLayout layout = layout_of(job, 8);
  const Planner planner(attention_work(job), layout, kKernel, {}, {});
  EXPECT_EQ(planner.boundaries().size(), 2U);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(planner.plan(rank).bytes_received(), 0);
    EXPECT_EQ(planner.plan(rank).buffer_rows, 0);
  }
}

// One owner of a whole block: handed on in pieces, so that no link carries the block more than once.
TEST(Plan, ABlockOfOneOwnerIsHandedOnInPieces) {
  Job job = causal_job(65536);
  job.spec.mask = {-1, -1};
  const JobLayout layout = layout_of(job, 8, LayoutKind::kContiguous);
  for (const Route route : {Route::kChain, Route::kDirect}) {
    PlanOptions options;
    options.route = route;
    options.block_tokens = 8192;
    const Planner planner(attention_work(job), layout, kKernel, {}, options);
    for (int rank = 0; rank < 8; ++rank) {
      const BlockPlan block = planner.plan(rank).blocks.at(3);
      EXPECT_LE(block.bytes_sent, 8192 * kv_token_bytes(job.spec));
      EXPECT_EQ(block.parts.size(), 8U);
      // The owner sends eight pieces to the next rank, which hands them on, and so on to the rank before the owner.
      EXPECT_EQ(block.sends.size(), rank == 2 ? 0U : 8U);
    }
  }
}

// A short block is sent to each rank, not handed on: seven messages' latency would cost more than its bytes.
TEST(Plan, AShortBlockOfOneOwnerGoesStraight) {
  const Job job = causal_job(65536);
  const JobLayout layout = layout_of(job, 8);
  PlanOptions options;
  options.block_tokens = 128;
  const BlockPlan block = make_plan(attention_work(job), layout, kKernel, {}, options, 0).blocks.at(0);
  ASSERT_EQ(block.sends.size(), 7U);
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(block.sends[static_cast<std::size_t>(i)].round, 0);
    EXPECT_EQ(block.sends[static_cast<std::size_t>(i)].peer, i + 1);
  }
}

TEST(Plan, TheFirstBlockIsSmallAndTheNextOnesGrow) {
  Job job = causal_job(1 << 20);
  const MachineModel machine{"", 6.5e14, 3.5e11, 8e-6};
  const JobLayout layout = layout_of(job, 8);
  const std::vector<std::int64_t> boundaries = block_boundaries(attention_work(job), layout, kKernel, machine, {});
  ASSERT_GE(boundaries.size(), 4U);
  EXPECT_LT(boundaries[1], 8192);
  EXPECT_GT(boundaries[2] - boundaries[1], 4 * boundaries[1]);
  EXPECT_LE(boundaries.size(), 40U);
}

// However fast the links are said to be, a block moves at most about 16 times what the one before it moved; and a small
// rest joins the last block.
TEST(Plan, GrowthIsBoundedAndASmallRestIsNoBlock) {
  const Job job = causal_job(75000);
  const JobLayout layout = layout_of(job, 2);
  const MachineModel machine{"", 1e9, 1e15, 0.0};
  const Plan plan = make_plan(attention_work(job), layout, kKernel, machine, {}, 1);
  ASSERT_EQ(plan.blocks.size(), 3U);
  EXPECT_EQ(plan.blocks[0].bytes_received, 128 * kv_token_bytes(job.spec));
  EXPECT_GT(plan.blocks[1].bytes_received, 15 * plan.blocks[0].bytes_received);
  EXPECT_LT(plan.blocks[1].bytes_received, 17 * plan.blocks[0].bytes_received);
  EXPECT_GT(plan.blocks[2].bytes_received, 16 * plan.blocks[1].bytes_received);
}

// A block may be a third larger than the one before it: from one tile that is lost in rounding, if it isn't kept up.
TEST(Plan, BlocksGrowFromASingleTile) {
  Job job = causal_job(65536);
  job.spec.mask = {-1, -1};
  const JobLayout layout = layout_of(job, 32);
  MachineModel machine;
  machine.latency_seconds = 0.0;
  const double compute_seconds = job_flops(job) / 32 / machine.flops_per_second;
  machine.link_bytes_per_second = 65536.0 * static_cast<double>(kv_token_bytes(job.spec)) / compute_seconds * 4.0 / 3.0;
  EXPECT_LE(block_boundaries(attention_work(job), layout, kKernel, machine, {}).size(), 30U);
}

// Nothing hides a transfer, so small blocks would only cost: there are as few as memory and their size allow.
TEST(Plan, WithoutOverlapBlocksAreFew) {
  const Job job = causal_job(262144);
  const JobLayout layout = layout_of(job, 4);
  const MachineModel machine;
  PlanOptions options;
  const auto hidden = block_boundaries(attention_work(job), layout, kKernel, machine, options);
  options.overlap = false;
  const auto bare = block_boundaries(attention_work(job), layout, kKernel, machine, options);
  EXPECT_LT(bare.size(), hidden.size());
  EXPECT_LE(bare.size() - 1, 262144U / 65536U);
  const auto seconds = [&](bool overlap) {
    PlanOptions cut = options;
    cut.overlap = overlap;
    return estimate_time(make_plan(attention_work(job), layout, kKernel, machine, cut, 0), machine, false).seconds;
  };
  EXPECT_LE(seconds(false), seconds(true));
  // The budget is kept all the same.
  options.memory_budget = std::size_t{40} << 20;
  const Plan plan = make_plan(attention_work(job), layout, kKernel, machine, options, 0);
  EXPECT_LE(plan.memory_bytes, options.memory_budget);
  EXPECT_GT(plan.blocks.size(), bare.size());
}

// Links as fast as the kernels in total, which they never are block by block: little of the job is spent waiting.
TEST(Plan, TransfersOverlapWithCompute) {
  constexpr double kExposedOnChain = 0.03;
  constexpr double kExposedDirect = 0.06;  // an owner of one tile more than the others sends it to all of them
  for (const Mask mask : {Mask{-1, 0}, Mask{-1, -1}}) {
    Job job = causal_job(65536);
    job.spec.mask = mask;
    const JobLayout layout = layout_of(job, 4);
    MachineModel machine;
    machine.flops_per_second = 5e10;
    const double compute_seconds = job_flops(job) / 4 / machine.flops_per_second;
    const double bytes = 0.75 * 65536 * static_cast<double>(kv_token_bytes(job.spec));
    machine.link_bytes_per_second = bytes / compute_seconds;
    for (const Route route : {Route::kChain, Route::kDirect}) {
      PlanOptions options;
      options.route = route;
      const double exposed = route == Route::kChain ? kExposedOnChain : kExposedDirect;
      const Planner planner(attention_work(job), layout, kKernel, machine, options);
      for (int rank = 0; rank < 4; ++rank) {
        const TimeEstimate time_estimate = estimate_time(planner.plan(rank), machine);
        EXPECT_LE(time_estimate.exposed_comm_seconds, exposed * compute_seconds) << mask.right << " rank " << rank;
        EXPECT_NEAR(time_estimate.seconds, compute_seconds + time_estimate.exposed_comm_seconds,
                    0.01 * compute_seconds);
      }
    }
  }
}

TEST(Plan, TheTimeEstimateFollowsTheTwoBuffers) {
  // Folds of 1, 1 and 4 s; transfers of 2, 3 and 5 s: the third waits for the first buffer.
  const MachineModel machine{"", 1.0, 1.0, 0.0};
  Plan plan;
  for (const auto& [flops, bytes] : {std::pair<double, std::int64_t>{1.0, 2}, {1.0, 3}, {4.0, 5}}) {
    plan.blocks.emplace_back();
    plan.blocks.back().flops = flops;
    plan.blocks.back().bytes_received = bytes;
    plan.blocks.back().receives = {{0, 0, {}}};
  }
  // Transfers end at 2, 5, 10; kernels at 3, 6, 14.
  EXPECT_DOUBLE_EQ(estimate_time(plan, machine).seconds, 14.0);
  EXPECT_DOUBLE_EQ(estimate_time(plan, machine).exposed_comm_seconds, 2.0 + 2.0 + 4.0);
  plan.blocks[0].flops = 10.0;  // transfers end at 2, 5, 17; kernels at 12, 13, 21
  EXPECT_DOUBLE_EQ(estimate_time(plan, machine).seconds, 21.0);
  EXPECT_DOUBLE_EQ(estimate_time(plan, machine).exposed_comm_seconds, 2.0 + 4.0);
  plan.blocks[0].receives.front().round = 2;  // three messages, one after the other
  const MachineModel slow{"", 1.0, 1.0, 1.0};
  EXPECT_DOUBLE_EQ(estimate_time(plan, slow).exposed_comm_seconds, 5.0 + 5.0);
}

TEST(Plan, TheTimeEstimateWithoutOverlapIsTheSum) {
  const MachineModel machine{"", 1.0, 1.0, 0.0};
  Plan plan;
  for (const auto& [flops, bytes] : {std::pair<double, std::int64_t>{1.0, 2}, {10.0, 3}, {4.0, 5}}) {
    plan.blocks.emplace_back();
    plan.blocks.back().flops = flops;
    plan.blocks.back().bytes_received = bytes;
    plan.blocks.back().receives = {{0, 0, {}}};
  }
  EXPECT_DOUBLE_EQ(estimate_time(plan, machine, false).seconds, 1.0 + 2.0 + 10.0 + 3.0 + 4.0 + 5.0);
  EXPECT_DOUBLE_EQ(estimate_time(plan, machine, false).exposed_comm_seconds, 2.0 + 3.0 + 5.0);
  EXPECT_LT(estimate_time(plan, machine).seconds, estimate_time(plan, machine, false).seconds);
}

// Some of these block sizes cut tiles, and some exceed the job.
TEST(Plan, ABlockHasSomeKeysMoreThanItIsAskedFor) {
  Job job = causal_job(0);
  job.batch.sequences = {{1000, 1000, 0}, {70, 70, 0}, {2000, 2000, 0}};
  const std::int64_t keys = job.batch.k_tokens();
  const JobLayout layout = layout_of(job, 3);
  for (const std::int64_t block : {1, 100, 128, 129, 1000, 2999, 3070, 5000}) {
    for (const bool stated : {true, false}) {
      PlanOptions options;
      (stated ? options.block_tokens : options.max_block_tokens) = block;
      const std::int64_t most = max_block_keys(keys, block, kKernel.key_tile);
      EXPECT_LE(most, std::min(keys, block + kKernel.key_tile));
      const Planner planner(attention_work(job), layout, kKernel, {}, options);
      for (std::size_t i = 0; i + 1 < planner.boundaries().size(); ++i) {
        EXPECT_LE(planner.boundaries()[i + 1] - planner.boundaries()[i], most) << block;
      }
    }
  }
  EXPECT_EQ(max_block_keys(keys, 0, kKernel.key_tile), keys);
  EXPECT_EQ(max_block_keys(keys, std::numeric_limits<std::int64_t>::max(), kKernel.key_tile), keys);
}

TEST(Plan, RefusesWhatMakesNoSense) {
  const Job job = causal_job(4096);
  const JobLayout layout = layout_of(job, 2);
  const auto plan = [&](const MachineModel& machine, const PlanOptions& options) {
    return refusal([&] { block_boundaries(attention_work(job), layout, kKernel, machine, options); },
                   ErrorCode::kUsage);
  };
  EXPECT_EQ(plan({"", 0.0, 1.0, 0.0}, {}),
            "the machine model's flops_per_second is 0 (a rate is above zero and finite). ringattn's info with "
            "measure measures one.");
  EXPECT_EQ(plan({"", 1.0, std::nan(""), 0.0}, {}),
            "the machine model's link_bytes_per_second is nan (a rate is above zero and finite). ringattn's info "
            "with measure measures one.");
  EXPECT_EQ(plan({"", 1.0, 1.0, -1.0}, {}),
            "the machine model's latency_seconds is -1 (a latency is at least zero and finite). ringattn's info "
            "with measure measures one.");
  PlanOptions options;
  options.block_tokens = -5;
  EXPECT_EQ(plan({}, options), "blocks of -5 tokens (a block holds at least one token). 0 lets the plan choose.");

  const Job other = causal_job(4095);
  EXPECT_EQ(refusal([&] { block_boundaries(attention_work(other), layout, kKernel, {}, {}); }, ErrorCode::kUsage),
            "the layout of the queries holds 4096 tokens in 1 sequence (the job has 4095 in 1, or divides them "
            "otherwise). Make the layout from the lengths of the job's sequences.");
  const JobLayout mixed{{}, layout.queries, layout_of(job, 3).keys};
  EXPECT_EQ(refusal([&] { block_boundaries(attention_work(job), mixed, kKernel, {}, {}); }, ErrorCode::kUsage),
            "queries on 2 ranks, keys on 3 (both layouts are of one world). Make both for the same number of ranks.");
}

// Every rank of 1,024 cuts the same blocks of a 2M-token job, and neighbours agree on what they exchange.
TEST(Plan, TwoMillionTokensOnAThousandRanks) {
  const Job job = causal_job(std::int64_t{2} << 20);
  const JobLayout layout = layout_of(job, 1024);
  PlanOptions options;
  options.route = Route::kChain;
  const Planner planner(attention_work(job), layout, kKernel, {}, options);
  const Plan plan = planner.plan(511);
  const Plan next = planner.plan(512);
  EXPECT_NEAR(plan.flops(), job_flops(job) / 1024, 0.001 * job_flops(job) / 1024);
  for (std::size_t i = 0; i < plan.blocks.size(); ++i) {
    const auto rows_to = [](const BlockPlan& block, const std::vector<PlannedMessage>& messages, int peer) {
      std::vector<std::array<std::int64_t, 4>> rows;
      for (const PlannedMessage& message : messages) {
        if (message.peer != peer) continue;
        for (const std::int32_t part : message.parts) {
          const MessagePart& p = block.parts[static_cast<std::size_t>(part)];
          rows.push_back({message.round, p.owner, p.owner_row, p.rows});
        }
      }
      return rows;
    };
    const auto sent = rows_to(plan.blocks[i], plan.blocks[i].sends, 512);
    EXPECT_EQ(sent.empty(), i + 1 == plan.blocks.size()) << i;
    EXPECT_EQ(sent, rows_to(next.blocks[i], next.blocks[i].receives, 511));
  }
}

}  // namespace
}  // namespace ringattn::testing
