// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/plan_summary.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "base/heartbeat_lock.hpp"
#include "base/size.hpp"
#include "ops/attention/attention_work.hpp"
#include "ops/attention/block_size.hpp"
#include "ops/attention/compressed_blocks.hpp"

namespace ringattn {

namespace {

// The inputs of a job's layout. Throws what check_size() throws.
LayoutInputs layout_inputs(const RingJob& job, const Options& options, int world) {
  check_size(job, options, world);
  return {job.work, job.kernel, options.layout, options.query_runs, options.key_runs, world};
}

JobLayout layout_of(const LayoutInputs& inputs) {
  const RingWork& work = inputs.work;
  const QueryWork pairs = query_work(work.batch, work.mask, work.block_mask.get(), work.positions.get());
  JobLayout layout = make_layout(work.batch, pairs, work.block_mask != nullptr, inputs.world, inputs.request,
                                 inputs.kernel.query_tile, inputs.kernel.key_tile);
  const auto state_runs = [&inputs](Layout& dealt, const auto& stated, std::string_view side,
                                    const std::vector<std::int64_t>& lengths) {
    if (!stated) return;
    if (static_cast<int>(stated->size()) != inputs.world) {
      fail(ErrorCode::kUsage, fmt::format("{} runs are stated for {} ranks", side, stated->size()),
           fmt::format("the world has {}", inputs.world), "State one list of runs for each rank.");
    }
    dealt = Layout(lengths, *stated);
  };
  state_runs(layout.queries, inputs.query_runs, "query", work.batch.q_lengths());
  state_runs(layout.keys, inputs.key_runs, "key", work.batch.k_lengths());
  return layout;
}

// A rank's memory includes prepared tables for this number of tasks as large as the whole job. Tasks of blocks are
// smaller, so this suffices for many blocks.
constexpr std::int64_t kCountedTasks = 8;

std::int64_t key_tiles(const RingJob& job) {
  const int key_tile = job.kernel.key_tile;
  std::int64_t tiles = 0;
  for (const Sequence& sequence : job.work.batch.sequences) tiles += (sequence.k_len + key_tile - 1) / key_tile;
  return tiles;
}

// Limits of a task over the whole job, an upper bound for all tasks of a plan. `tiles`: key_tiles() of the job.
AttentionLimits largest_task(const RingJob& job, const JobLayout& layout, int rank, std::int64_t tiles) {
  const RingWork& work = job.work;
  AttentionLimits limits;
  limits.rows = layout.queries.tokens(rank);
  limits.query_runs = static_cast<std::int64_t>(layout.queries.runs(rank).size());
  limits.key_runs = tiles;
  limits.tiles = limits.key_runs * tile_page_runs(job, layout.keys.world());
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(work.batch.sequences.size());
  limits.prepared = reads_pages(job.page_size, layout.keys.world()) ? 0 : kCountedTasks;
  if (work.block_mask == nullptr) return limits;
  for (const TokenRun& run : layout.queries.runs(rank)) {
    const auto sequence = static_cast<std::size_t>(run.sequence);
    limits.mask_tile_runs +=
        work.block_mask->runs(sequence, work.batch.sequences[sequence].q_offset + run.begin, run.tokens());
  }
  return limits;
}

// Bytes of a rank that don't depend on the blocks: shards, results, scratch, the dense copy and spare rows.
std::size_t fixed_bytes(const RingJob& job, const JobLayout& layout, const Options& options, int rank, bool staged,
                        std::int64_t tiles) {
  const std::int64_t k_rows = layout.keys.tokens(rank);
  const std::int64_t key_rows = k_rows + (staged ? k_rows : 0) + 2 * spare_rows(job, options, layout.queries.world());
  const std::int64_t query_rows = layout.queries.tokens(rank);
  const std::int64_t staged_query_bytes = staged ? token_bytes(job.work.streams, /*queries=*/true) : 0;
  return static_cast<std::size_t>(query_rows * (job.query_bytes + staged_query_bytes) +
                                  key_rows * token_bytes(job.work.streams) + k_rows * job.key_bytes) +
         job.fixed_bytes + job.scratch_bytes(largest_task(job, layout, rank, tiles));
}

PlanOptions plan_options(const RingJob& job, const JobLayout& layout, const Options& options, Route route,
                         bool staged) {
  PlanOptions result;
  result.route = route;
  result.block_tokens = options.block_tokens;
  result.max_block_tokens = job.max_block_tokens;
  result.memory_budget = options.memory_budget;
  result.state_out = options.state_out;
  result.checksum = options.checksum;
  result.overlap = options.overlap;
  const int world = layout.queries.world();
  const bool copied = job.gathered || ((staged || job.page_size > 0) && world > 1);
  const std::int64_t tiles = key_tiles(job);  // for the maximum number of sequences, so computed once for all ranks
  for (int rank = 0; rank < world; ++rank) {  // all ranks have the same blocks, so the maximum over ranks counts
    result.fixed_bytes = std::max(result.fixed_bytes, fixed_bytes(job, layout, options, rank, copied, tiles));
    result.state_bytes =
        std::max(result.state_bytes, job.state_bytes({layout.keys.tokens(rank), layout.queries.tokens(rank)}));
  }
  return result;
}

constexpr std::int64_t kMaxPlanEntries = std::int64_t{1} << 20;  // 134 million keys in tiles of 128
constexpr std::int64_t kMaxOfAllRanks = std::int64_t{1} << 26;
constexpr std::int64_t kMaxSequencesOfAllRanks = std::int64_t{1} << 24;
constexpr std::int64_t kFewPageRuns = std::int64_t{1} << 16;  // their tables take a few megabytes

// Number of table entries of a plan: tiles, or stripes if they are shorter. Stops counting above the maximum.
std::int64_t table_entries(const Batch& batch, std::int64_t shortest) {
  const auto of = [&](const Sequence& sequence) {
    return (std::max<std::int64_t>({sequence.k_len, sequence.q_len, 1}) - 1) / shortest + 1;
  };
  std::int64_t sum = 0;
  for (const Sequence& sequence : batch.sequences) {
    sum += of(sequence);
    if (sum > kMaxPlanEntries) break;
  }
  return sum;
}

// Checks, before large tables are allocated, that the budget can hold an equal share of the tensors.
void check_budget(const RingJob& job, const Options& options, int world) {
  const Batch& batch = job.work.batch;
  const double bytes =
      static_cast<double>(batch.q_tokens()) * static_cast<double>(job.query_bytes) +
      static_cast<double>(batch.k_tokens()) * static_cast<double>(token_bytes(job.work.streams) + job.key_bytes);
  if (options.memory_budget == 0 || bytes / world <= static_cast<double>(options.memory_budget)) return;
  fail(ErrorCode::kMemory,
       fmt::format("a memory budget of {} a rank is too small", counted(options.memory_budget, "byte")),
       fmt::format("q, k, v, O and LSE take at least {:.0f} bytes on the rank with the most tokens", bytes / world),
       "Use more ranks, or fewer tokens.");
}

}  // namespace

RingJob ring_job(const Job& job, const Options& options, const AttentionKernel& kernel, int world,
                 std::size_t gemm_scratch_bytes) {
  RingJob ring;
  ring.work = attention_work(job);
  ring.kernel = {kernel.key_tile(), kernel.query_tile()};
  ring.query_bytes = query_bytes(job.spec);
  ring.page_size = job.format.is_plain() ? job.page_size : 0;
  ring.gathered = job.page_size > 0 && !job.format.is_plain();
  ring.state_bytes = [&kernel](const RowCounts& rows) { return kernel.state_bytes(rows.queries); };
  ring.scratch_bytes = [&kernel](const AttentionLimits& limits) { return kernel.scratch_bytes(limits); };
  if (job.format.is_plain()) return ring;
  const std::vector<std::int64_t> sizes = block_sizes(options, job.batch.k_tokens(), kBlockTokens, kernel.key_tile());
  const auto job_of_size = [&](std::size_t i) {
    RingJob with = ring;
    with.max_block_tokens = sizes[i];
    with.fixed_bytes = decompression_bytes(job, options, sizes[i], kernel.key_tile()) + gemm_scratch_bytes;
    return with;
  };
  return job_of_size(choose_block_size(sizes.size(), options, world, job_of_size));
}

void check_size(const RingJob& job, const Options& options, int world) {
  const int key_tile = job.kernel.key_tile;
  const bool shorter = options.layout.stripe > 0 && options.layout.stripe < key_tile;
  const std::int64_t count = table_entries(job.work.batch, shorter ? options.layout.stripe : key_tile);
  if (count > kMaxPlanEntries || count > kMaxOfAllRanks / std::max(world, 1)) {
    fail(ErrorCode::kMemory, fmt::format("the job is too large for {} {}", world, world == 1 ? "rank" : "ranks"),
         fmt::format("a plan holds at most {} {} of {} keys, and {} in the tables of all its ranks", kMaxPlanEntries,
                     shorter ? "stripes" : "tiles", shorter ? options.layout.stripe : key_tile, kMaxOfAllRanks),
         shorter ? "Use longer stripes, fewer tokens or sequences, or fewer ranks."
                 : "Use fewer tokens or sequences, or fewer ranks.");
  }
  const auto sequences = static_cast<std::int64_t>(job.work.batch.sequences.size());
  if (sequences > kMaxSequencesOfAllRanks / std::max(world, 1)) {
    fail(ErrorCode::kMemory, fmt::format("the job has too many sequences for {} ranks", world),
         fmt::format("it has {}, and the tables of all ranks hold at most {}", sequences, kMaxSequencesOfAllRanks),
         "Use fewer sequences, or fewer ranks.");
  }
  if (count > kFewPageRuns) check_budget(job, options, world);
}

WorldPlans::WorldPlans(const RingJob& job, const Options& options, Route route, int world, bool staged)
    : inputs_(layout_inputs(job, options, world)),
      layout_(layout_of(inputs_)),
      plan_options_(plan_options(job, layout_, options, route, staged)),
      machine_(options.machine),
      planner_(inputs_.work, layout_, inputs_.kernel, machine_, plan_options_) {}

// The needs of the kernels are recomputed, as for new plans.
bool WorldPlans::are_of(const RingJob& job, const Options& options, Route route, int world, bool staged) const {
  return machine_ == options.machine && inputs_ == layout_inputs(job, options, world) &&
         plan_options_ == plan_options(job, layout_, options, route, staged);
}

MinBudget::MinBudget(const RingJob& job, const Options& options, int world)
    : options_(options),
      layout_(layout_of(layout_inputs(job, options, world))),
      axis_(job.work.batch, job.kernel.key_tile),
      needs_(job.work, layout_, axis_, job.kernel.query_tile, job.kernel.key_tile),
      steps_(axis_) {}

std::size_t MinBudget::of(const RingJob& job) const {
  // Routes don't affect memory.
  const CutDirection keys[] = {{job.work, axis_, needs_}};
  return min_budget(keys, steps_, job.kernel, plan_options(job, layout_, options_, Route::kDirect, false));
}

namespace {

// The plans of a world, made by the first rank of this process that asks for them and shared with the others.
std::shared_ptr<const WorldPlans> shared_world_plans(const RingJob& job, const Options& options, Route route, int world,
                                                     bool staged) {
  static std::mutex mutex;
  static std::weak_ptr<const WorldPlans> last;
  const auto lock = lock_with_heartbeat(mutex);
  std::shared_ptr<const WorldPlans> shared = last.lock();
  if (!shared || !shared->are_of(job, options, route, world, staged)) {
    shared = std::make_shared<const WorldPlans>(job, options, route, world, staged);
    last = shared;
  }
  return shared;
}

}  // namespace

PlanSummary summarize_plan(const RingJob& job, const Options& options, Route route, int world, int rank, bool staged) {
  std::shared_ptr<const WorldPlans> all = shared_world_plans(job, options, route, world, staged);
  Plan plan = all->plan(rank);
  const TimeEstimate time_estimate = estimate_time(plan, options.machine, options.overlap);
  return {std::move(all), std::move(plan), time_estimate};
}

bool reads_pages(std::int64_t page_size, int world) { return page_size > 0 && world == 1; }

int tile_page_runs(const RingJob& job, int world) {
  return reads_pages(job.page_size, world) ? page_runs_per_tile(job.kernel.key_tile, job.page_size) : 1;
}

AttentionLimits task_limits(const Plan& plan, int page_runs_per_tile) {
  AttentionLimits limits;
  for (const QueryRun& run : plan.queries) {
    limits.rows += run.rows;
    if (plan.block_mask == nullptr) continue;
    limits.mask_tile_runs += plan.block_mask->runs(static_cast<std::size_t>(run.sequence), run.position, run.rows);
  }
  limits.query_runs = static_cast<std::int64_t>(plan.queries.size());
  for (const BlockPlan& block : plan.blocks) {
    limits.key_runs = std::max(limits.key_runs, static_cast<std::int64_t>(block.key_runs.size()));
    limits.tiles = std::max(limits.tiles, static_cast<std::int64_t>(block.tiles.size()) * page_runs_per_tile);
  }
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(plan.key_lengths.size());
  return limits;
}

AttentionLimits reserved_limits(const RingJob& job, const Options& options, const JobLayout& layout, const Plan& plan) {
  const AttentionLimits largest = largest_task(job, layout, plan.rank, key_tiles(job));
  const int page_runs_per_tile = tile_page_runs(job, plan.world);
  AttentionLimits limits = task_limits(plan, page_runs_per_tile);
  if (options.shorter_lengths) {
    limits.key_runs = std::min(limits.key_runs + limits.sequences, largest.key_runs);
    limits.tiles = std::min(limits.tiles + limits.sequences * page_runs_per_tile, largest.tiles);
  }
  limits.prepared = reads_pages(job.page_size, plan.world) ? 0 : static_cast<std::int64_t>(plan.blocks.size());
  if (job.scratch_bytes(limits) > job.scratch_bytes(largest)) limits.prepared = 0;
  return limits;
}

std::int64_t spare_rows(const RingJob& job, const Options& options, int world) {
  if (!options.shorter_lengths || world == 1) return 0;
  // A block has at least one tile of keys, and a sequence that lies on several ranks has at least two keys in it.
  const std::int64_t tile = job.kernel.key_tile;
  return tile * (1 + std::min(static_cast<std::int64_t>(job.work.batch.sequences.size()), tile / 2));
}

}  // namespace ringattn
