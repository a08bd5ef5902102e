// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/lengths.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why) {
  fail(ErrorCode::kUsage, what, why, "Prepare an Attention for the longest lengths that will come.");
}

void check_lengths(const Batch& batch, const Batch& prepared) {
  if (batch.sequences.size() > prepared.sequences.size()) {
    refuse(fmt::format("there are {} sequences", batch.sequences.size()),
           fmt::format("{} were prepared", prepared.sequences.size()));
  }
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    const Sequence& sequence = batch.sequences[i];
    const Sequence& limit = prepared.sequences[i];
    if (sequence.q_len <= limit.q_len && sequence.k_len <= limit.k_len) continue;
    refuse(fmt::format("sequence {} has {} queries and {} keys", i, sequence.q_len, sequence.k_len),
           fmt::format("{} and {} were prepared", limit.q_len, limit.k_len));
  }
}

// Everything that is allocated once for the runs of a rank.
struct Capacity {
  AttentionLimits task;
  std::int64_t buffer_rows = 0;
  bool keeps_state = false;

  // Text of the first size in which `other` exceeds this capacity; empty if it fits.
  std::string misses(const Capacity& other) const {
    const auto more = [](std::string_view what, std::int64_t needed, std::int64_t there) {
      return needed <= there ? std::string() : fmt::format("{} {}, {} were prepared", needed, what, there);
    };
    for (const std::string& missing : {more("query rows", other.task.rows, task.rows),
                                       more("runs of queries", other.task.query_runs, task.query_runs),
                                       more("runs of keys in a block", other.task.key_runs, task.key_runs),
                                       more("key tiles in a block", other.task.tiles, task.tiles),
                                       more("rows of a block buffer", other.buffer_rows, buffer_rows),
                                       more("attention states", other.keeps_state ? 1 : 0, keeps_state ? 1 : 0)}) {
      if (!missing.empty()) return missing;
    }
    return {};
  }
};

Capacity capacity_of(const Plan& plan, int page_runs_per_tile) {
  return {task_limits(plan, page_runs_per_tile), plan.buffer_rows, plan.keeps_state};
}

}  // namespace

Options options_within(const RingJob& prepared, const Options& options, const Batch& batch, Route route, int world) {
  check_lengths(batch, prepared.work.batch);
  if (!options.shorter_lengths) refuse("the lengths can't be changed", "Options::shorter_lengths is off");
  if (options.query_runs || options.key_runs) {
    refuse("the lengths can't be changed", "the caller stated the layout of the prepared ones");
  }
  if (prepared.work.block_mask != nullptr) {
    refuse("the lengths can't be changed", "the job's block mask is made for the prepared ones");
  }
  if (prepared.work.positions != nullptr) {
    refuse("the lengths can't be changed", "the keys' positions are those of the prepared ones");
  }
  check_batch(batch);
  RingJob job = prepared;
  job.work.batch = batch;

  const WorldPlans allocated(prepared, options, route, world);
  std::vector<Capacity> capacities;
  Options fitting = options;
  for (int rank = 0; rank < world; ++rank) {
    const Plan plan = allocated.plan(rank);
    capacities.push_back({reserved_limits(prepared, options, allocated.layout(), plan),
                          plan.buffer_rows + spare_rows(prepared, options, world), plan.keeps_state});
  }
  for (const BlockPlan& block : allocated.plan(0).blocks) {
    fitting.block_tokens = std::max(fitting.block_tokens, block.last_token - block.first_token);
  }
  const std::int64_t tile = prepared.kernel.key_tile;
  std::string missing;
  for (std::int64_t tiles = (fitting.block_tokens + tile - 1) / tile; tiles > 0; tiles /= 2) {
    fitting.block_tokens = tiles * tile;
    const WorldPlans wanted(job, fitting, route, world);
    missing.clear();
    for (int rank = 0; rank < world && missing.empty(); ++rank) {
      missing =
          capacities[static_cast<std::size_t>(rank)].misses(capacity_of(wanted.plan(rank), tile_page_runs(job, world)));
      if (!missing.empty()) missing = fmt::format("rank {} needs {}", rank, missing);
    }
    if (missing.empty()) return fitting;
  }
  refuse("these lengths need more memory than was prepared", missing);
}

}  // namespace ringattn
