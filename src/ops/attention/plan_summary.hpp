// SPDX-License-Identifier: Apache-2.0
// Plans without ranks or devices. `ringattn plan` prints them, and the constructors of the ops use them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "attention/options.hpp"
#include "attention/ring/blocks.hpp"
#include "attention/ring/needs.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/tile_axis.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn {

// A job as input of a plan: the work of the ring, and the memory that a rank needs besides its blocks.
struct RingJob {
  RingWork work;
  KernelShape kernel;
  std::int64_t query_bytes = 0;       // per query: rows of the rank's tensors and of the op's workspace
  std::int64_t key_bytes = 0;         // per key: the same, besides the rows of the streams
  std::size_t fixed_bytes = 0;        // of the op, independent of the rank's rows
  std::int64_t max_block_tokens = 0;  // PlanOptions::max_block_tokens
  std::int64_t page_size = 0;         // Job::page_size of plain keys that one rank reads in place
  bool gathered = false;              // the rank gathers the pages of its keys into dense rows first
  // Bytes that the op's kernels need: state of the rank's rows, and scratch of tasks within `limits`.
  std::function<std::size_t(const RowCounts& rows)> state_bytes;
  std::function<std::size_t(const AttentionLimits& limits)> scratch_bytes;
};

// For Attention in a world of `world` ranks. `kernel` must outlive the result. `gemm_scratch_bytes`: scratch of the
// GEMMs that decompress a rank's keys and values. If keys are compressed, throws what choose_block_size()
// (block_size.hpp) throws.
RingJob ring_job(const Job& job, const Options& options, const AttentionKernel& kernel, int world,
                 std::size_t gemm_scratch_bytes = 0);

// Checks from the lengths, before anything is allocated, that the plans of such a world fit into host memory. Throws
// kMemory.
void check_size(const RingJob& job, const Options& options, int world);

// All inputs of a layout. Equal inputs have equal layouts.
struct LayoutInputs {
  RingWork work;
  KernelShape kernel;
  LayoutRequest request;
  // As in Options.
  std::optional<std::vector<std::vector<TokenRun>>> query_runs;
  std::optional<std::vector<std::vector<TokenRun>>> key_runs;
  int world = 1;

  bool operator==(const LayoutInputs&) const = default;
};

// The plans of a world of `world` ranks. `staged`: the caller's rows that are sent are strided. Throws the kUsage and
// kMemory errors of the ops' constructors.
class WorldPlans {
 public:
  WorldPlans(const RingJob& job, const Options& options, Route route, int world, bool staged = false);
  WorldPlans(const Job& job, const Options& options, const AttentionKernel& kernel, Route route, int world)
      : WorldPlans(ring_job(job, options, kernel, world), options, route, world) {}
  WorldPlans(const WorldPlans&) = delete;  // planner_ refers to layout_
  WorldPlans& operator=(const WorldPlans&) = delete;

  // True if the constructor would give the same plans for these arguments. Throws as it does.
  bool are_of(const RingJob& job, const Options& options, Route route, int world, bool staged) const;

  const JobLayout& layout() const { return layout_; }
  Plan plan(int rank) const { return planner_.plan(rank); }

 private:
  // In order of dependency. are_of() compares all members that layout_ and planner_ are computed from.
  LayoutInputs inputs_;
  JobLayout layout_;
  PlanOptions plan_options_;
  MachineModel machine_;
  Planner planner_;
};

// The smallest memory budgets of a world, for jobs in which only keys are sent, that have the batch, mask and tiles of
// the constructor's job and may differ in what they need besides blocks. Throws the layout errors of WorldPlans.
class MinBudget {
 public:
  MinBudget(const RingJob& job, const Options& options, int world);
  MinBudget(const MinBudget&) = delete;  // needs_ refers to layout_
  MinBudget& operator=(const MinBudget&) = delete;

  // The smallest Options::memory_budget that WorldPlans accepts for the job.
  std::size_t of(const RingJob& job) const;

 private:
  Options options_;
  JobLayout layout_;
  TileAxis axis_;
  Needs needs_;
  BlockSteps steps_;
};

// The plan of one rank and its time estimate. Ranks of one process share the WorldPlans.
struct PlanSummary {
  std::shared_ptr<const WorldPlans> world;
  Plan plan;
  TimeEstimate time_estimate;

  const JobLayout& layout() const { return world->layout(); }
};
PlanSummary summarize_plan(const RingJob& job, const Options& options, Route route, int world, int rank,
                           bool staged = false);
inline PlanSummary summarize_plan(const Job& job, const Options& options, const AttentionKernel& kernel, Route route,
                                  int world, int rank) {
  return summarize_plan(ring_job(job, options, kernel, world), options, route, world, rank);
}

// True if tasks read plain keys from cache pages in place, which requires one rank. Several ranks gather their pages,
// because sent rows must be contiguous.
bool reads_pages(std::int64_t page_size, int world);
// AttentionTask::page_runs of the job's tasks.
int tile_page_runs(const RingJob& job, int world);
// Limits of the largest task of a plan whose tiles are mapped in `page_runs_per_tile` page runs. No task is prepared.
AttentionLimits task_limits(const Plan& plan, int page_runs_per_tile);
// Limits to reserve for a plan. They include the prepared tables of all tasks, if the plan's memory counts them; tasks
// that read pages are never prepared, because their tables change with each run. With Options::shorter_lengths they
// include the additional sequence runs that a block of shorter sequences may have.
AttentionLimits reserved_limits(const RingJob& job, const Options& options, const JobLayout& layout, const Plan& plan);
// Additional rows of each block buffer for tiles of shorter sequences that are assembled from the rows of several
// ranks. 0 without Options::shorter_lengths.
std::int64_t spare_rows(const RingJob& job, const Options& options, int world);

}  // namespace ringattn
