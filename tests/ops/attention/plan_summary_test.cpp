// SPDX-License-Identifier: Apache-2.0
// The ranks of a process share what their plans have in common, and nothing else. A request that differs gets plans of
// its own, the same as without earlier requests.
#include "ops/attention/plan_summary.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/ring/reshard.hpp"
#include "kernels/attention/attention_spec.hpp"

namespace ringattn::testing {
namespace {

constexpr int kWorld = 3;
constexpr std::int64_t kStateBytes = 600;  // of a row

// What a plan depends on.
struct Asked {
  RingJob job;
  Options options;
  Route route = Route::kDirect;
  int world = kWorld;
  bool staged = false;

  PlanSummary shared() const { return summarize_plan(job, options, route, world, 0, staged); }
  WorldPlans fresh() const { return {job, options, route, world, staged}; }
};

std::shared_ptr<const BlockMask> some_lists(std::int32_t block) {
  return std::make_shared<BlockMask>(BlockMaskShape{2048, 128, 1},
                                     std::vector<MaskedSequence>{{0, 2000, 2000}, {0, 900, 900}},
                                     std::vector<std::int64_t>{0, 1, 2}, std::vector<std::int32_t>{block, 0});
}

// Needs of kernels whose memory grows linearly.
Asked asked() {
  Asked all;
  all.job.work = {{{{2000, 2000, 0}, {900, 900, 0}}}, {-1, 0}, {{"k", 256}, {"v", 256}}, 1000.0};
  all.job.kernel = {128, 16};
  all.job.query_bytes = 512;
  all.job.state_bytes = [](const RowCounts& rows) { return static_cast<std::size_t>(rows.queries * kStateBytes); };
  all.job.scratch_bytes = [](const AttentionLimits& limits) { return static_cast<std::size_t>(limits.tiles * 64); };
  all.options.block_tokens = 512;
  return all;
}

using TokenRuns = std::vector<std::vector<TokenRun>>;

TokenRuns runs_of(const Layout& layout) {
  TokenRuns runs;
  for (int rank = 0; rank < layout.world(); ++rank) {
    runs.emplace_back(layout.runs(rank).begin(), layout.runs(rank).end());
  }
  return runs;
}

// A rank's plan in numbers, and who owns what.
using Seen = std::tuple<TokenRuns, TokenRuns, std::vector<std::int64_t>, std::vector<std::int64_t>,
                        std::vector<std::size_t>, std::vector<double>, std::size_t, bool>;
Seen seen(const JobLayout& layout, const Plan& plan) {
  std::vector<std::int64_t> blocks, bytes;
  std::vector<std::size_t> tiles;
  std::vector<double> flops;
  for (const BlockPlan& block : plan.blocks) {
    blocks.push_back(block.last_token);
    bytes.push_back(block.bytes_received);
    tiles.push_back(block.tiles.size());
    flops.push_back(block.flops);
  }
  return {runs_of(layout.queries), runs_of(layout.keys), blocks, bytes, tiles, flops,
          plan.memory_bytes,       plan.keeps_state};
}

TEST(PlanSummaries, AreSharedByTheRanksOfAProcess) {
  const Asked mine = asked();
  Asked theirs = asked();  // kernels of their own, which need as much
  const PlanSummary first = mine.shared();
  EXPECT_EQ(theirs.shared().world, first.world);
  theirs.options.threads = 7;
  theirs.options.timeout_seconds = 1.0;
  theirs.options.kernel = {"cpu", "auto"};
  EXPECT_EQ(theirs.shared().world, first.world) << "no plan depends on these";
  Asked listed = asked(), listed_too = asked();
  listed.job.work.block_mask = some_lists(0);
  listed_too.job.work.block_mask = some_lists(0);
  const PlanSummary of_lists = listed.shared();
  EXPECT_EQ(listed_too.shared().world, of_lists.world) << "the lists say the same";
}

TEST(PlanSummaries, AreOfWhatIsAskedForWhateverWasBefore) {
  const std::vector<std::pair<const char*, std::function<void(Asked&)>>> changes = {
      {"route", [](Asked& other) { other.route = Route::kChain; }},
      {"world", [](Asked& other) { other.world = 4; }},
      {"staged", [](Asked& other) { other.staged = true; }},
      {"layout", [](Asked& other) { other.options.layout.kind = LayoutKind::kContiguous; }},
      {"stripe", [](Asked& other) { other.options.layout.stripe = 512; }},
      {"query_runs",
       [](Asked& other) {
         other.options.query_runs = runs_of(even_layout(std::vector<std::int64_t>{2000, 900}, 3));
       }},
      {"key_runs",
       [](Asked& other) {
         other.options.key_runs = runs_of(even_layout(std::vector<std::int64_t>{2000, 900}, 3));
       }},
      {"block_tokens", [](Asked& other) { other.options.block_tokens = 256; }},
      {"checksum", [](Asked& other) { other.options.checksum = true; }},
      {"state_out",
       [](Asked& other) {
         other.options.block_tokens = 1 << 20;
         other.options.state_out = true;
       }},
      {"machine", [](Asked& other) { other.options.machine.latency_seconds = 1.0; }},
      {"overlap", [](Asked& other) { other.options.overlap = false; }},
      {"memory_budget", [](Asked& other) { other.options.memory_budget = 4 << 20; }},
      {"shorter_lengths", [](Asked& other) { other.options.shorter_lengths = true; }},
      {"batch",
       [](Asked& other) {
         other.job.work.batch.sequences = {{2000, 2000, 0}, {901, 901, 0}};
       }},
      {"mask",
       [](Asked& other) {
         other.job.work.mask = {300, 0};
       }},
      {"streams",
       [](Asked& other) {
         other.job.work.streams = {{"k", 256}, {"v", 128}};
       }},
      {"pair_flops", [](Asked& other) { other.job.work.pair_flops = 999.0; }},
      {"key_flops", [](Asked& other) { other.job.work.key_flops = 10.0; }},
      {"query_flops", [](Asked& other) { other.job.work.query_flops = 10.0; }},
      {"lists", [](Asked& other) { other.job.work.block_mask = some_lists(1); }},
      {"tiles", [](Asked& other) { other.job.kernel.key_tile = 64; }},
      {"query_bytes", [](Asked& other) { ++other.job.query_bytes; }},
      {"fixed_bytes", [](Asked& other) { ++other.job.fixed_bytes; }},
      {"page_size", [](Asked& other) { other.job.page_size = 16; }},
      {"max_block_tokens",
       [](Asked& other) {
         other.options.block_tokens = 0;
         other.job.max_block_tokens = 256;
       }},
  };
  const Asked before = asked();
  for (const auto& [name, change] : changes) {
    Asked other = asked();
    change(other);
    const PlanSummary first = before.shared();  // is shared while it lives
    const PlanSummary second = other.shared();
    const WorldPlans fresh = other.fresh();
    EXPECT_NE(second.world, first.world) << name;
    EXPECT_EQ(seen(second.layout(), second.plan), seen(fresh.layout(), fresh.plan(0))) << name;
  }
}

// Kernels are asked for what the job's ranks need, and not for something that all of them may agree on.
TEST(PlanSummaries, AreOfTheirOwnKernels) {
  const Asked before = asked();
  const PlanSummary first = before.shared();
  Asked other = asked();
  other.job.state_bytes = [](const RowCounts& rows) {
    return static_cast<std::size_t>((rows.queries == 4096 ? 1 : 2) * rows.queries * kStateBytes);
  };
  EXPECT_EQ(other.shared().plan.memory_bytes, other.fresh().plan(0).memory_bytes);
  other = asked();
  other.job.scratch_bytes = [](const AttentionLimits& limits) {
    return static_cast<std::size_t>(limits.tiles == 4096 ? limits.tiles * 64 : limits.tiles * 65);
  };
  EXPECT_EQ(other.shared().plan.memory_bytes, other.fresh().plan(0).memory_bytes);
}

}  // namespace
}  // namespace ringattn::testing
