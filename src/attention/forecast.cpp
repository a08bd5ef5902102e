// SPDX-License-Identifier: Apache-2.0
#include "attention/forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "attention/attention_work.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

JobLayout layout_of(const Job& job, const Options& options, const FoldKernel& kernel, int world) {
  JobLayout layout = make_layout(job, world, options.layout, kernel.query_tile(), kernel.key_tile());
  const auto state_runs = [world](Layout& dealt, const auto& stated, std::string_view side,
                                  const std::vector<std::int64_t>& lengths) {
    if (!stated) return;
    if (static_cast<int>(stated->size()) != world) {
      fail(ErrorCode::kUsage, fmt::format("{} runs are stated for {} ranks", side, stated->size()),
           fmt::format("the world has {}", world), "State one list of runs for each rank.");
    }
    dealt = Layout(lengths, *stated);
  };
  state_runs(layout.queries, options.query_runs, "query", job.batch.q_lengths());
  state_runs(layout.keys, options.key_runs, "key", job.batch.k_lengths());
  return layout;
}

// How many tasks as large as the whole job a rank's memory is counted for. Blocks are smaller, so this is room for the
// tables of many.
constexpr std::int64_t kCountedTasks = 8;

// A task of everything, which no task of a plan exceeds.
FoldLimits largest_task(const Job& job, const JobLayout& layout, const FoldKernel& kernel, int rank) {
  FoldLimits limits;
  limits.rows = layout.queries.tokens(rank);
  limits.query_runs = static_cast<std::int64_t>(layout.queries.runs(rank).size());
  for (const Sequence& sequence : job.batch.sequences) {
    limits.tiles += (sequence.k_len + kernel.key_tile() - 1) / kernel.key_tile();
  }
  limits.key_runs = limits.tiles;
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  limits.prepared = kCountedTasks;
  return limits;
}

// What a rank needs whatever the blocks are: its shards, results, scratch, the dense copy and spare rows.
std::size_t fixed_bytes(const Job& job, const JobLayout& layout, const Options& options, const FoldKernel& kernel,
                        int rank, bool staged) {
  const std::int64_t k_rows = layout.keys.tokens(rank);
  const std::int64_t rows = (staged ? k_rows : 0) + 2 * spare_rows(job, options, kernel, layout.queries.world());
  return static_cast<std::size_t>(shard_bytes(job.spec, layout.queries.tokens(rank), k_rows) +
                                  rows * kv_token_bytes(job.spec)) +
         kernel.scratch_bytes(largest_task(job, layout, kernel, rank));
}

PlanOptions plan_options(const Job& job, const JobLayout& layout, const Options& options, const FoldKernel& kernel,
                         Route route, bool staged_kv) {
  PlanOptions result;
  result.route = route;
  result.block_tokens = options.block_tokens;
  result.memory_budget = options.memory_budget;
  result.state_out = options.state_out;
  result.checksum = options.checksum;
  result.overlap = options.overlap;
  const int world = layout.queries.world();
  for (int rank = 0; rank < world; ++rank) {  // ranks must cut the same blocks, so the neediest decides
    result.fixed_bytes =
        std::max(result.fixed_bytes, fixed_bytes(job, layout, options, kernel, rank, staged_kv && world > 1));
    result.state_bytes = std::max(result.state_bytes, kernel.state_bytes(layout.queries.tokens(rank)));
  }
  return result;
}

// Tables grow with a job before it is known what it needs; beyond this no machine has its tensors.
const Job& check_size(const Job& job, int key_tile, int world) {
  constexpr std::int64_t kMostTiles = std::int64_t{1} << 20;  // 134 million keys in tiles of 128
  constexpr std::int64_t kMostOfAllRanks = std::int64_t{1} << 26;
  std::int64_t tiles = 0;
  for (const Sequence& sequence : job.batch.sequences) {
    const std::int64_t longest = std::max<std::int64_t>({sequence.k_len, sequence.q_len, 1});
    tiles += (longest - 1) / key_tile + 1;
    if (tiles > kMostTiles) break;
  }
  if (tiles > kMostTiles || tiles > kMostOfAllRanks / std::max(world, 1)) {
    fail(ErrorCode::kMemory, fmt::format("the job is too large for {} {}", world, world == 1 ? "rank" : "ranks"),
         fmt::format("a plan holds at most {} tiles of {} keys, and {} in the tables of all its ranks", kMostTiles,
                     key_tile, kMostOfAllRanks),
         "Use fewer tokens or sequences, or fewer ranks.");
  }
  return job;
}

}  // namespace

Forecasts::Forecasts(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world,
                     bool staged_kv)
    : layout_(layout_of(check_size(job, kernel.key_tile(), world), options, kernel, world)),
      planner_(attention_work(job), layout_, {kernel.key_tile(), kernel.query_tile()}, options.machine,
               plan_options(job, layout_, options, kernel, route, staged_kv)) {}

Forecast forecast(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world, int rank,
                  bool staged_kv) {
  const Forecasts all(job, options, kernel, route, world, staged_kv);
  Plan plan = all.plan(rank);
  const Prediction prediction = predict(plan, options.machine, options.overlap);
  return {all.layout(), std::move(plan), prediction};
}

FoldLimits task_limits(const Plan& plan) {
  FoldLimits limits;
  for (const QueryRun& run : plan.queries) limits.rows += run.rows;
  limits.query_runs = static_cast<std::int64_t>(plan.queries.size());
  for (const BlockPlan& block : plan.blocks) {
    limits.key_runs = std::max(limits.key_runs, static_cast<std::int64_t>(block.key_runs.size()));
    limits.tiles = std::max(limits.tiles, static_cast<std::int64_t>(block.tiles.size()));
  }
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(plan.key_lengths.size());
  return limits;
}

FoldLimits reserved_limits(const Job& job, const Options& options, const JobLayout& layout, const Plan& plan,
                           const FoldKernel& kernel) {
  const FoldLimits largest = largest_task(job, layout, kernel, plan.rank);
  FoldLimits limits = task_limits(plan);
  if (options.shorter_lengths) {
    limits.key_runs = std::min(limits.key_runs + limits.sequences, largest.key_runs);
    limits.tiles = std::min(limits.tiles + limits.sequences, largest.tiles);
  }
  limits.prepared = static_cast<std::int64_t>(plan.blocks.size());
  if (kernel.scratch_bytes(limits) > kernel.scratch_bytes(largest)) limits.prepared = 0;
  return limits;
}

std::int64_t spare_rows(const Job& job, const Options& options, const FoldKernel& kernel, int world) {
  if (!options.shorter_lengths || world == 1) return 0;
  // A block is at least one tile of keys; a sequence in it that lies on several ranks has two keys or more.
  const std::int64_t tile = kernel.key_tile();
  return tile * (1 + std::min(static_cast<std::int64_t>(job.batch.sequences.size()), tile / 2));
}

}  // namespace ringattn
