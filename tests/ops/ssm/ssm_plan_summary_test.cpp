// SPDX-License-Identifier: Apache-2.0
// Memory and transfers of SSM ops and decode steps by their plan summaries, and budgets that are too small.
#include "ops/ssm/ssm_plan_summary.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>

#include "attention/tokens/cost.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "ops/decode/decode_memory.hpp"
#include "ops/ssm/ssm.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

SsmJob job_of(std::vector<std::int64_t> lengths) {
  SsmSpec spec;
  spec.dtype = Dtype::kBf16;
  spec.heads = 4;
  spec.head_dim = 8;
  spec.state_dim = 16;
  SsmJob job;
  job.spec = spec;
  job.lengths = std::move(lengths);
  return job;
}

SsmPlanSummary summarize_plan(const SsmJob& job, int world) {
  const auto choice = choose_kernel(job.spec, KernelRequest{"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  const auto kernel = choice.row->make_kernel(job.spec, *backend);
  return summarize_ssm_plan(job, {}, world, kernel.get(), {"any", 1e9, 1e9, 1e-5}, 1e8);
}

TEST(SsmPlanSummaries, StatesTravelFromRankToRankOneBehindTheOther) {
  const SsmJob job = job_of({4 * kSuper});
  const MachineModel machine{"slow", 1e9, 1e6, 0.25};
  const double half_state = 0.5 * 4 * 8 * 16 * sizeof(float) / 1e6;
  for (const int world : {1, 2, 4}) {
    const SsmPlanSummary all = summarize_plan(job, world);
    EXPECT_EQ(all.states_moved(), world - 1);
    EXPECT_DOUBLE_EQ(passing_seconds(job, all, machine), (world - 1) * (0.25 + half_state));
    EXPECT_DOUBLE_EQ(all.balance(), 1.0);
  }
  EXPECT_EQ(summarize_plan(job_of({kSuper, kSuper}), 2).states_moved(), 0) << "nothing goes on elsewhere";
}

// Two launches cost a GPU more than one: heads go in halves where hops take longer than that. A CPU loses nothing.
TEST(SsmPlanSummaries, HeadsGoInHalvesWhereHopsWouldTakeLongerThanHalvesCost) {
  SsmJob job = job_of({64 * kSuper});
  job.spec.heads = 80;
  job.spec.head_dim = 64;
  job.spec.state_dim = 128;
  const auto ranges = [&job](std::string_view kernel, int world, double latency) {
    const auto choice = choose_kernel(job.spec, KernelRequest{"auto", std::string(kernel)}, KernelScope::kAnyMachine);
    const auto backend = choice.row->make_backend({1, kNoDevice});
    const auto made = choice.row->make_kernel(job.spec, *backend);
    return summarize_ssm_plan(job, {}, world, made.get(), {"any", 1e14, 2.5e11, latency}, 1e12).ranges.size();
  };
  EXPECT_EQ(ranges("cpu_ssd", 1, 1.0), 1U) << "nothing travels";
  EXPECT_EQ(ranges("cpu_ssd", 2, 0.0), 2U);
  for (const KernelRow<SsmSpec>& row : kernel_table<SsmSpec>()) {
    if (row.backend != "cuda" || !row.missing(job.spec).empty()) continue;
    EXPECT_EQ(ranges(row.name, 2, 1e-5), 1U) << row.name;
    EXPECT_EQ(ranges(row.name, 64, 1e-5), 2U) << row.name;
    EXPECT_EQ(ranges(row.name, 2, 1.0), 2U) << row.name;
  }
}

TEST(SsmPlanSummaries, AConv1dInFrontTakesItsOwnTime) {
  SsmJob job = job_of({2 * kSuper});
  const double scan = summarize_plan(job, 2).seconds;
  EXPECT_DOUBLE_EQ(scan, ssm_token_flops(job.spec) * kSuper / 1e9);
  const SsmJobChoice choice = choose_kernel(job, KernelRequest{"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  EXPECT_EQ(conv1d_rate(job, choice, *backend), 0.0) << "there is none";
  job.convolution = CausalConv1dSpec{.dtype = job.spec.dtype, .channels = 64, .width = 4};
  EXPECT_DOUBLE_EQ(summarize_plan(job, 2).seconds, scan + 2.0 * 64 * 4 * kSuper / 1e8);
  const auto beside = choose_kernel(*job.convolution, KernelRequest{"cpu", "auto"});
  EXPECT_EQ(conv1d_rate(job, choice, *backend), beside.row->speed(*job.convolution, *backend));
}

// One segment of at most four heads is one work tile of SSD, so other threads have none.
TEST(SsmPlanSummaries, ThreadsWithoutAWorkTileDoNotCount) {
  SsmJob job = job_of({kSuper});
  const SsmJobChoice choice = choose_kernel(job, KernelRequest{"cpu", "cpu_ssd"});
  const auto rate = [&](int threads, std::int64_t tokens) {
    return ssm_rate(job, choice, *choice.row->make_backend({threads, kNoDevice}), tokens);
  };
  EXPECT_LE(rate(16, kSegmentTokens), rate(1, kSegmentTokens));
  EXPECT_GT(rate(16, 16 * kSegmentTokens), 5.0 * rate(1, kSegmentTokens));
  EXPECT_LT(rate(16, 17 * kSegmentTokens), rate(16, 16 * kSegmentTokens)) << "a second round of one work tile";
  job.spec.heads = 20;
  EXPECT_GT(rate(16, kSegmentTokens), 2.0 * rate(1, kSegmentTokens));
  const auto backend = choice.row->make_backend({16, kNoDevice});
  // Wider heads are limited by memory less.
  EXPECT_GT(choice.row->flops_per_second(*backend), rate(16, kManyTokens));
  EXPECT_LT(choice.row->flops_per_second(*backend), 2.0 * rate(16, kManyTokens));
  const SsmPlanSummary all = summarize_ssm_plan(job, {}, 1, choice.ssm->make_kernel(job.spec, *backend).get(), {}, 0.0,
                                                [](std::int64_t tokens) { return static_cast<double>(tokens); });
  EXPECT_DOUBLE_EQ(all.seconds, ssm_token_flops(job.spec)) << "the rate is that of a rank's tokens";
}

// A token's position, and its rotated k and q, or its angles where the kernel rotates rows as it loads them.
TEST(SsmPlanSummaries, RopeTakesAnglesOrRotatedRows) {
  SsmJob plain = job_of({kSuper});
  plain.spec.groups = plain.spec.heads;
  plain.spec.decay = SsmDecay::kHead;
  SsmJob rotated = plain;
  RopeParameters half;
  half.partial_rotary_factor = 0.5;
  rotated.rope = make_rope_spec(half, plain.spec.dtype, 16, RopePairs::kHalfSplit, /*exact=*/false);
  for (const KernelRow<SsmSpec>& row : kernel_table<SsmSpec>()) {
    if (!row.missing(plain.spec).empty()) continue;
    const auto backend = row.make_backend({1, kNoDevice});
    const auto kernel = row.make_kernel(plain.spec, *backend);
    const auto scratch = [&](const SsmJob& job) {
      return summarize_ssm_plan(job, {}, 1, kernel.get(), {"any", 1e9, 1e9, 1e-5}, 1e8).max_memory().scratch;
    };
    const std::size_t bytes = row.backend == "cpu" ? 8 * sizeof(float) : 2 * 4 * 16 * 2;  // k and q of 4 heads, bf16
    EXPECT_EQ(scratch(rotated), scratch(plain) + kSuper * (8 + bytes)) << row.name;
  }
}

TEST(SsmPlanSummaries, BalanceIsTheMostTokensOverTheMean) {
  EXPECT_DOUBLE_EQ(summarize_plan(job_of({3 * kSuper}), 2).balance(), 2.0 / 1.5);
  EXPECT_DOUBLE_EQ(summarize_plan(job_of({kSuper}), 4).balance(), 4.0);
}

TEST(Budgets, HoldEverythingOrAreRefusedWithItsParts) {
  const SsmMemory scan{1000, 200, 30, 4};
  check_budget(scan, 0);
  check_budget(scan, 1234);
  const Error of_ssm = error_of([&] { check_budget(scan, 1233); });
  EXPECT_EQ(of_ssm.code(), ErrorCode::kMemory);
  EXPECT_STREQ(
      of_ssm.what(),
      "a memory budget of 1233 bytes a rank is too small (1234 bytes are needed: 1000 for rows, 200 for states, "
      "30 for scratch, 4 for states that are exchanged). Use more ranks or fewer tokens.");
  DecodeMemory decode;
  decode.cache = 10000;
  decode.tables = 1;
  decode.rows = 20;
  decode.scratch = 300;
  decode.partials = 4000;
  check_budget(decode, 0);
  check_budget(decode, 14321);
  const Error of_step = error_of([&] { check_budget(decode, 14320); });
  EXPECT_EQ(of_step.code(), ErrorCode::kMemory);
  EXPECT_STREQ(of_step.what(),
               "a memory budget of 14320 bytes a rank is too small (14321 are needed: 10000 of cache, 4300 of scratch "
               "and partial results, 21 of rows and tables). Use more ranks, or allow for fewer or shorter sequences.");
}

}  // namespace
}  // namespace ringattn::testing
