// SPDX-License-Identifier: Apache-2.0
// The plans of a world without the world: what `plan` prints, and what the constructor of Attention uses. No ranks, no
// devices, no MPI.
#pragma once

#include <memory>

#include "attention/options.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/fold.hpp"

namespace ringattn {

// Whether there is room for the plans of such a world, from the lengths alone: before anything is made of them. Throws
// kMemory.
void check_size(const Job& job, const Options& options, const FoldKernel& kernel, int world);

// The plans of a world of `world` ranks. `staged_kv`: the caller's k and v are strided. Throws what the constructor of
// Attention throws of kUsage and kMemory.
class Forecasts {
 public:
  Forecasts(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world,
            bool staged_kv = false);
  Forecasts(const Forecasts&) = delete;  // the planner refers to the layout that is kept here
  Forecasts& operator=(const Forecasts&) = delete;

  const JobLayout& layout() const { return layout_; }
  Plan plan(int rank) const { return planner_.plan(rank); }

 private:
  JobLayout layout_;
  Planner planner_;
};

// The plan of one rank, with its prediction. The ranks of a process share what their plans have in common.
struct Forecast {
  std::shared_ptr<const Forecasts> world;
  Plan plan;
  Prediction prediction;

  const JobLayout& layout() const { return world->layout(); }
};
Forecast forecast(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world, int rank,
                  bool staged_kv = false);

// Whether the job's tasks read keys from the pages of a cache, where they lie: on one rank. Several ranks first copy
// theirs side by side, as those that travel must lie.
bool reads_pages(const Job& job, int world);
// FoldTask::pieces of the job's tasks.
int tile_pieces(const Job& job, const FoldKernel& kernel, int world);
// What the largest task of a plan holds, whose tiles are mapped in so many pieces. None of its tasks are prepared.
FoldLimits task_limits(const Plan& plan, int pieces);
// What is reserved for a plan: room for its tasks, which are all prepared where the memory for that was counted in the
// plan (where they read pages, none are: those are named anew in each run); and with Options::shorter_lengths for as
// many more pieces of sequences as a block of shorter ones may hold.
FoldLimits reserved_limits(const Job& job, const Options& options, const JobLayout& layout, const Plan& plan,
                           const FoldKernel& kernel);
// Rows of each block buffer beside those that the plan needs, for tiles of shorter sequences that are assembled from
// the rows of several ranks. None without Options::shorter_lengths.
std::int64_t spare_rows(const Job& job, const Options& options, const FoldKernel& kernel, int world);

}  // namespace ringattn
