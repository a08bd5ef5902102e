// SPDX-License-Identifier: Apache-2.0
// The plans of a world without the world: what `plan` prints, and what the constructors of the front doors use. No
// ranks, no devices, no MPI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "attention/options.hpp"
#include "attention/ring/needs.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/tile_axis.hpp"
#include "kernels/attention.hpp"

namespace ringattn {

// An op's job in the words of a summary: what its plan must know, and what a rank needs beside its blocks.
struct RingJob {
  RingWork work;
  KernelShape kernel;
  std::int64_t query_bytes = 0;       // of one query: rows of the rank's own tensors, and of an op's workspace
  std::size_t fixed_bytes = 0;        // of an op, whatever the rank's rows are
  std::int64_t max_block_tokens = 0;  // PlanOptions::max_block_tokens
  std::int64_t page_size = 0;         // Job::page_size of plain keys, which one rank reads where they lie
  bool gathered = false;              // keys lie in pages otherwise: every rank copies its own side by side first
  // What the op's kernels need: state of so many query rows, and scratch for tasks within such limits.
  std::function<std::size_t(std::int64_t rows)> state_bytes;
  std::function<std::size_t(const AttentionLimits& limits)> scratch_bytes;
};

// Attention's, in a world of `world` ranks. `kernel` outlives what is returned. `gemm_scratch_bytes`: scratch of the
// products that decompress keys and values of a rank. Where keys are compressed, throws what choose_block_size()
// (block_size.hpp) throws.
RingJob ring_job(const Job& job, const Options& options, const AttentionKernel& kernel, int world,
                 std::size_t gemm_scratch_bytes = 0);

// Whether there is room for the plans of such a world, from the lengths alone: before anything is made of them. Throws
// kMemory.
void check_size(const RingJob& job, const Options& options, int world);

// All that a layout follows from: it is made of this alone, and equal ones have equal layouts.
struct LayoutInputs {
  RingWork work;
  KernelShape kernel;
  LayoutRequest request;
  // Options' of the same names.
  std::optional<std::vector<std::vector<TokenRun>>> query_runs;
  std::optional<std::vector<std::vector<TokenRun>>> key_runs;
  int world = 1;

  bool operator==(const LayoutInputs&) const = default;
};

// The plans of a world of `world` ranks. `staged`: the caller's rows that travel are strided. Throws what the
// constructors of front doors throw of kUsage and kMemory.
class WorldPlans {
 public:
  WorldPlans(const RingJob& job, const Options& options, Route route, int world, bool staged = false);
  WorldPlans(const Job& job, const Options& options, const AttentionKernel& kernel, Route route, int world)
      : WorldPlans(ring_job(job, options, kernel, world), options, route, world) {}
  WorldPlans(const WorldPlans&) = delete;  // the planner refers to the layout that is kept here
  WorldPlans& operator=(const WorldPlans&) = delete;

  // Whether the constructor would make the same of these. Throws as it does.
  bool are_of(const RingJob& job, const Options& options, Route route, int world, bool staged) const;

  const JobLayout& layout() const { return layout_; }
  Plan plan(int rank) const { return planner_.plan(rank); }

 private:
  // In the order in which they follow from each other. The layout and the planner are made of the others alone, which
  // compare all their members: what plans come to depend on is compared, too.
  LayoutInputs inputs_;
  JobLayout layout_;
  PlanOptions plan_options_;
  MachineModel machine_;
  Planner planner_;
};

// The smallest memory budgets of a world, for jobs that have the batch, the mask and the tiles of the first and differ
// in what they need beside their blocks. Throws what the constructor of WorldPlans throws of layouts.
class MinBudget {
 public:
  MinBudget(const RingJob& job, const Options& options, int world);
  MinBudget(const MinBudget&) = delete;  // the needs refer to the layout that is kept here
  MinBudget& operator=(const MinBudget&) = delete;

  // The smallest Options::memory_budget with which WorldPlans doesn't refuse the job.
  std::size_t of(const RingJob& job) const;

 private:
  Options options_;
  JobLayout layout_;
  TileAxis axis_;
  Needs needs_;
};

// The plan of one rank, with its time_estimate. The ranks of a process share what their plans have in common.
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

// Whether tasks of plain keys read them from the pages of a cache, where they lie: on one rank. Several ranks first
// copy theirs side by side, as those that travel must lie.
bool reads_pages(std::int64_t page_size, int world);
// AttentionTask::pieces of the job's tasks.
int tile_page_runs(const RingJob& job, int world);
// What the largest task of a plan holds, whose tiles are mapped in so many pieces. None of its tasks are prepared.
AttentionLimits task_limits(const Plan& plan, int pieces);
// What is reserved for a plan: room for its tasks, which are all prepared where the memory for that was counted in the
// plan (where they read pages, none are: those are named anew in each run); and with Options::shorter_lengths for as
// many more pieces of sequences as a block of shorter ones may hold.
AttentionLimits reserved_limits(const RingJob& job, const Options& options, const JobLayout& layout, const Plan& plan);
// Rows of each block buffer beside those that the plan needs, for tiles of shorter sequences that are assembled from
// the rows of several ranks. None without Options::shorter_lengths.
std::int64_t spare_rows(const RingJob& job, const Options& options, int world);

}  // namespace ringattn
