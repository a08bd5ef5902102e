// SPDX-License-Identifier: Apache-2.0
// A GatedDelta on 1 to 8 ranks gives the bits of the kernel on all tokens, by memcmp of o and of final states.
#include "ops/gated_delta/gated_delta.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gated_delta_rank.hpp"

namespace ringattn::testing {
namespace {

SsmOptions delta_options() {
  SsmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

GatedDeltaSpec small_delta(bool key_decays) {
  GatedDeltaSpec spec;
  spec.key_heads = 1;
  spec.value_heads = 3;
  spec.key_dim = 16;
  spec.value_dim = 8;
  spec.key_decays = key_decays;
  return spec;
}

class GatedDeltaWorld : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  static void in_world(const std::function<void(Transport&)>& rank_main, const ThreadsDelivery& delivery = {}) {
    if (ranks() > 1) {
      run_threads_world(ranks(), delivery, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }
  static void expect_same(const DeltaCase& given, const SsmOptions& options = delta_options(),
                          const ThreadsDelivery& delivery = {}) {
    std::atomic<std::int64_t> differ = 0;
    std::atomic<std::int64_t> tokens = 0;
    in_world(
        [&](Transport& world) {
          GatedDelta rule(job_of(given), world, options);
          DeltaRank rank(rule, world.rank(), given);
          rule.run(rank.inputs(), rank.outputs());
          differ += rank.differences();
          tokens += rule.layout().tokens(world.rank());
        },
        delivery);
    EXPECT_EQ(differ, 0);
    EXPECT_EQ(tokens, given.data.rows());
  }
};

TEST_P(GatedDeltaWorld, SequencesThatEndOnAndInsideOfShards) {
  static const DeltaCase gdn = make_delta_case(small_delta(false), {9000, 1, 4096, 100, 2048 + 64, 3, 2048}, true, 1);
  static const DeltaCase kda = make_delta_case(small_delta(true), {7 * 2048 + 77}, false, 2);
  expect_same(gdn);
  expect_same(kda);
  SsmOptions other = delta_options();
  other.head_ranges = 3 - static_cast<int>(ranks() > 1);  // two, where states are sent
  if (ranks() == 1) other.head_ranges = 1;
  expect_same(gdn, other, {.shuffle_seed = 7, .max_delay = std::chrono::microseconds(300)});
}

TEST_P(GatedDeltaWorld, FewerSegmentsThanRanksAndEmptySequences) {
  static const DeltaCase few = make_delta_case(small_delta(false), {3000, 65}, false, 3);
  static const DeltaCase empty = make_delta_case(small_delta(false), {0, 0, 2053, 0, 3, 0, 0, 64, 0}, true, 4);
  expect_same(few);
  expect_same(empty);
}

// One rank's segments need not be neighbours: states then go back and forth.
TEST_P(GatedDeltaWorld, RunsOfTheCallers) {
  static const DeltaCase given = make_delta_case(small_delta(true), {4 * 2048 + 9, 2048 + 70}, true, 5);
  SsmOptions options = delta_options();
  options.runs.emplace(static_cast<std::size_t>(ranks()));
  int next = 0;
  for (std::size_t s = 0; s < given.data.lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < given.data.lengths[s]; begin += kSegmentTokens) {
      (*options.runs)[static_cast<std::size_t>(ranks() - 1 - next++ % ranks())].push_back(
          {static_cast<std::int32_t>(s), begin, std::min(given.data.lengths[s], begin + kSegmentTokens)});
    }
  }
  expect_same(given, options);
}

TEST_P(GatedDeltaWorld, UpdatesOfSingleTokens) {
  DeltaCase given = make_delta_case(small_delta(false), {1, 1, 1, 1, 1}, true, 6);
  given.expected = update_gated_delta(*choose_kernel(given.data.spec, {"cpu", "auto"}).row, given.data);
  std::atomic<std::int64_t> differ = 0;
  in_world([&](Transport& world) {
    GatedDeltaJob job = job_of(given);
    job.update = true;
    GatedDelta rule(job, world, delta_options());
    DeltaRank rank(rule, world.rank(), given);
    rule.enqueue(rank.inputs(), rank.outputs());
    rule.wait();
    differ += rank.differences();
  });
  EXPECT_EQ(differ, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GatedDeltaWorld, ::testing::Values(1, 2, 3, 5, 8),
                         [](const auto& test) { return fmt::format("{}", test.param); });

TEST(GatedDeltaOp, RefusesRunsThatCutASegment) {
  const std::int64_t lengths[] = {5000};
  const auto layout = [&](std::int64_t cut) {
    const std::vector<std::vector<TokenRun>> runs{{{0, 0, cut}}, {{0, cut, 5000}}};
    return ssm_layout(lengths, runs, 2, kGatedDeltaUnit);
  };
  EXPECT_EQ(error_of([&] { layout(1000); }).code(), ErrorCode::kUsage);
  EXPECT_EQ(layout(2048).tokens(0), 2048);
}

// States of both jobs have the same size, so that one job would take the other's.
TEST(GatedDeltaOp, RefusesDifferentJobsOfTheRanks) {
  const DeltaCase few = make_delta_case(small_delta(false), {2048 + 5}, false, 7);
  const DeltaCase many = make_delta_case(small_delta(false), {2048 + 70}, false, 8);
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    GatedDelta first(job_of(few), world, delta_options());
    GatedDelta second(job_of(many), world, delta_options());
    DeltaRank of_first(first, world.rank(), few);
    DeltaRank of_second(second, world.rank(), many);
    const Error error = error_of([&] {
      world.rank() == 0 ? first.run(of_first.inputs(), of_first.outputs())
                        : second.run(of_second.inputs(), of_second.outputs());
    });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("rank 1 and rank 0 run different jobs"), std::string::npos);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST(GatedDeltaOp, PlansWhatIsPassedOn) {
  const GatedDeltaJob job{small_delta(false), {8 * 2048 + 5}, false, true, false};
  const GatedDeltaChoice choice = choose_kernel(job.spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  const auto kernel = choice.row->make_kernel(job.spec, *backend);
  const MachineModel machine = default_machine(*choice.row, *backend);
  const SsmPlanSummary plan = summarize_gated_delta_plan(job, {}, 4, *kernel, machine);
  EXPECT_EQ(plan.states_moved(), 3);
  EXPECT_EQ(state_bytes(job.spec), 3 * 16 * 8 * 4);
  EXPECT_EQ(plan.memory[0].exchange, 3U * 16 * 8 * 4);  // one state is sent
  EXPECT_EQ(plan.memory[1].exchange, 2U * 3 * 16 * 8 * 4);
  EXPECT_EQ(plan.layout.tokens(0) % kSegmentTokens, 0);
  // Ranks share the chunks of a sequence, but its state passes through all nine segments in order.
  std::int64_t most = 0;
  for (int rank = 0; rank < 4; ++rank) most = std::max(most, plan.layout.tokens(rank));
  const double compute = gated_delta_token_flops(job.spec) * static_cast<double>(most) / machine.flops_per_second;
  EXPECT_DOUBLE_EQ(plan.seconds, compute + kernel->carry_seconds(1, 9));
  EXPECT_GT(kernel->carry_seconds(1, 9), 0.0);
  EXPECT_EQ(kernel->carry_seconds(1, 1), 0.0) << "no state comes before the only segment";
  EXPECT_DOUBLE_EQ(summarize_gated_delta_plan(job, {}, 4, *kernel, machine, {}, 0.5).seconds,
                   compute + kernel->carry_seconds(1, 9) / 2);
}

// Estimates count the work items that kernels make: heads of a key head share an item unless threads lack items.
TEST(GatedDeltaOp, EstimatesCountTheItemsOfAKernel) {
  GatedDeltaSpec spec = small_delta(false);
  spec.value_heads = 8;
  spec.key_heads = 1;
  for (const KernelRow<GatedDeltaSpec>& row : kernel_table<GatedDeltaSpec>()) {
    if (row.backend != "cpu") continue;
    const auto backend = row.make_backend({16, kNoDevice});
    const auto items = [&](std::int64_t tokens) { return row.host_work(spec, *backend, tokens).phases[0].tiles; };
    const bool shares = row.name == "cpu_gated_delta_amx";
    EXPECT_EQ(items(1), 8.0) << row.name;
    EXPECT_EQ(items(31 * kSegmentTokens), 31.0 * 8) << row.name;
    EXPECT_EQ(items(32 * kSegmentTokens), 32.0 * (shares ? 2 : 8)) << row.name;
    spec.key_decays = true;
    EXPECT_EQ(items(32 * kSegmentTokens), 32.0 * 8) << row.name << ": each head has products of its own";
    spec.key_decays = false;
  }
}

}  // namespace
}  // namespace ringattn::testing
