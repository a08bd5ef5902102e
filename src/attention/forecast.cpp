// SPDX-License-Identifier: Apache-2.0
#include "attention/forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention_work.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

JobLayout layout_of(const Job& job, const Options& options, const FoldKernel& kernel, int world) {
  check_size(job, options, kernel, world);
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

std::int64_t key_tiles(const Job& job, const FoldKernel& kernel) {
  std::int64_t tiles = 0;
  for (const Sequence& sequence : job.batch.sequences) {
    tiles += (sequence.k_len + kernel.key_tile() - 1) / kernel.key_tile();
  }
  return tiles;
}

// A task of everything, which no task of a plan exceeds.
FoldLimits largest_task(const Job& job, const JobLayout& layout, const FoldKernel& kernel, int rank) {
  FoldLimits limits;
  limits.rows = layout.queries.tokens(rank);
  limits.query_runs = static_cast<std::int64_t>(layout.queries.runs(rank).size());
  limits.key_runs = key_tiles(job, kernel);
  limits.tiles = limits.key_runs * tile_pieces(job, kernel, layout.keys.world());
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  limits.prepared = reads_pages(job, layout.keys.world()) ? 0 : kCountedTasks;
  if (job.lists == nullptr) return limits;
  for (const TokenRun& run : layout.queries.runs(rank)) {
    const auto sequence = static_cast<std::size_t>(run.sequence);
    limits.list_runs += job.lists->runs(sequence, job.batch.sequences[sequence].q_offset + run.begin, run.tokens());
  }
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
  const bool staged = (staged_kv || job.page_size > 0) && world > 1;
  for (int rank = 0; rank < world; ++rank) {  // ranks must cut the same blocks, so the neediest decides
    result.fixed_bytes = std::max(result.fixed_bytes, fixed_bytes(job, layout, options, kernel, rank, staged));
    result.state_bytes = std::max(result.state_bytes, kernel.state_bytes(layout.queries.tokens(rank)));
  }
  return result;
}

constexpr std::int64_t kMostPieces = std::int64_t{1} << 20;  // 134 million keys in tiles of 128
constexpr std::int64_t kMostOfAllRanks = std::int64_t{1} << 26;
constexpr std::int64_t kMostSequencesOfAllRanks = std::int64_t{1} << 24;
constexpr std::int64_t kFewPieces = std::int64_t{1} << 16;  // whose tables take a few megabytes

// What the tables of a plan have an entry for: tiles, or stripes where these are shorter. It stops beyond kMostPieces.
std::int64_t pieces(const Job& job, std::int64_t shortest) {
  const auto of = [&](const Sequence& sequence) {
    return (std::max<std::int64_t>({sequence.k_len, sequence.q_len, 1}) - 1) / shortest + 1;
  };
  std::int64_t sum = 0;
  for (const Sequence& sequence : job.batch.sequences) {
    sum += of(sequence);
    if (sum > kMostPieces) break;
  }
  return sum;
}

// Before tables of many entries are made: a budget that can't even hold an equal share of the tensors.
void check_budget(const Job& job, const Options& options, int world) {
  const double bytes =
      static_cast<double>(job.batch.q_tokens()) *
          static_cast<double>(q_token_bytes(job.spec) + out_token_bytes(job.spec) + lse_token_bytes(job.spec)) +
      static_cast<double>(job.batch.k_tokens()) * static_cast<double>(kv_token_bytes(job.spec));
  if (options.memory_budget == 0 || bytes / world <= static_cast<double>(options.memory_budget)) return;
  fail(ErrorCode::kMemory,
       fmt::format("a memory budget of {} a rank is too small", counted(options.memory_budget, "byte")),
       fmt::format("the rank with most of q, k, v, O and LSE has at least {:.0f} bytes of them", bytes / world),
       "Use more ranks, or fewer tokens.");
}

}  // namespace

void check_size(const Job& job, const Options& options, const FoldKernel& kernel, int world) {
  const int key_tile = kernel.key_tile();
  const bool shorter = options.layout.stripe > 0 && options.layout.stripe < key_tile;
  const std::int64_t count = pieces(job, shorter ? options.layout.stripe : key_tile);
  if (count > kMostPieces || count > kMostOfAllRanks / std::max(world, 1)) {
    fail(ErrorCode::kMemory, fmt::format("the job is too large for {} {}", world, world == 1 ? "rank" : "ranks"),
         fmt::format("a plan holds at most {} {} of {} keys, and {} in the tables of all its ranks", kMostPieces,
                     shorter ? "stripes" : "tiles", shorter ? options.layout.stripe : key_tile, kMostOfAllRanks),
         shorter ? "Use longer stripes, fewer tokens or sequences, or fewer ranks."
                 : "Use fewer tokens or sequences, or fewer ranks.");
  }
  const auto sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  if (sequences > kMostSequencesOfAllRanks / std::max(world, 1)) {
    fail(ErrorCode::kMemory, fmt::format("the job has too many sequences for {} ranks", world),
         fmt::format("it has {}, and the tables of all ranks hold at most {}", sequences, kMostSequencesOfAllRanks),
         "Use fewer sequences, or fewer ranks.");
  }
  if (count > kFewPieces) check_budget(job, options, world);
}

Forecasts::Forecasts(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world,
                     bool staged_kv)
    : layout_(layout_of(job, options, kernel, world)),
      planner_(attention_work(job), layout_, {kernel.key_tile(), kernel.query_tile()}, options.machine,
               plan_options(job, layout_, options, kernel, route, staged_kv)) {}

namespace {

// What a world's plans depend on.
struct ForecastKey {
  Job job;
  Options options;
  Route route;
  int world;
  bool staged_kv;
  std::vector<std::size_t> kernel;  // what it says of itself

  bool operator==(const ForecastKey& other) const {
    const Options& a = options;
    const Options& b = other.options;
    return route == other.route && world == other.world && staged_kv == other.staged_kv && kernel == other.kernel &&
           a.layout.kind == b.layout.kind && a.layout.stripe == b.layout.stripe && a.block_tokens == b.block_tokens &&
           a.memory_budget == b.memory_budget && a.checksum == b.checksum && a.state_out == b.state_out &&
           a.overlap == b.overlap && a.shorter_lengths == b.shorter_lengths && a.machine == b.machine &&
           job.spec == other.job.spec && job.batch == other.job.batch && job.page_size == other.job.page_size &&
           (job.lists == other.job.lists ||
            (job.lists != nullptr && other.job.lists != nullptr && *job.lists == *other.job.lists)) &&
           a.query_runs == b.query_runs && a.key_runs == b.key_runs;
  }
};

struct SharedForecasts {
  SharedForecasts(ForecastKey the_key, const FoldKernel& kernel)
      : key(std::move(the_key)), forecasts(key.job, key.options, kernel, key.route, key.world, key.staged_kv) {}

  ForecastKey key;
  Forecasts forecasts;
};

std::vector<std::size_t> numbers_of(const FoldKernel& kernel) {
  FoldLimits some;
  some.rows = some.tiles = some.key_runs = some.query_runs = 1 << 12;
  some.sources = 2;
  some.sequences = some.prepared = 8;
  return {static_cast<std::size_t>(kernel.key_tile()), static_cast<std::size_t>(kernel.query_tile()),
          kernel.scratch_bytes(some), kernel.state_bytes(some.rows)};
}

// Made by the first rank of this process that asks for them, one after the other.
std::shared_ptr<const Forecasts> shared_forecasts(ForecastKey key, const FoldKernel& kernel) {
  static std::mutex mutex;
  static std::weak_ptr<const SharedForecasts> last;
  const std::lock_guard lock(mutex);
  std::shared_ptr<const SharedForecasts> shared = last.lock();
  if (!shared || !(shared->key == key)) {
    shared = std::make_shared<const SharedForecasts>(std::move(key), kernel);
    last = shared;
  }
  return {shared, &shared->forecasts};
}

}  // namespace

Forecast forecast(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world, int rank,
                  bool staged_kv) {
  auto all = shared_forecasts({job, options, route, world, staged_kv, numbers_of(kernel)}, kernel);
  Plan plan = all->plan(rank);
  const Prediction prediction = predict(plan, options.machine, options.overlap);
  return {std::move(all), std::move(plan), prediction};
}

bool reads_pages(const Job& job, int world) { return job.page_size > 0 && world == 1; }

int tile_pieces(const Job& job, const FoldKernel& kernel, int world) {
  return reads_pages(job, world) ? pieces_of_tile(kernel.key_tile(), job.page_size) : 1;
}

FoldLimits task_limits(const Plan& plan, int pieces) {
  FoldLimits limits;
  for (const QueryRun& run : plan.queries) {
    limits.rows += run.rows;
    if (plan.lists == nullptr) continue;
    limits.list_runs += plan.lists->runs(static_cast<std::size_t>(run.sequence), run.position, run.rows);
  }
  limits.query_runs = static_cast<std::int64_t>(plan.queries.size());
  for (const BlockPlan& block : plan.blocks) {
    limits.key_runs = std::max(limits.key_runs, static_cast<std::int64_t>(block.key_runs.size()));
    limits.tiles = std::max(limits.tiles, static_cast<std::int64_t>(block.tiles.size()) * pieces);
  }
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(plan.key_lengths.size());
  return limits;
}

FoldLimits reserved_limits(const Job& job, const Options& options, const JobLayout& layout, const Plan& plan,
                           const FoldKernel& kernel) {
  const FoldLimits largest = largest_task(job, layout, kernel, plan.rank);
  const int pieces = tile_pieces(job, kernel, plan.world);
  FoldLimits limits = task_limits(plan, pieces);
  if (options.shorter_lengths) {
    limits.key_runs = std::min(limits.key_runs + limits.sequences, largest.key_runs);
    limits.tiles = std::min(limits.tiles + limits.sequences * pieces, largest.tiles);
  }
  limits.prepared = reads_pages(job, plan.world) ? 0 : static_cast<std::int64_t>(plan.blocks.size());
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
