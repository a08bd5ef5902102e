// SPDX-License-Identifier: Apache-2.0
// What a scan will take of each rank, from its shape and its kernel alone: no ranks run here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

// Bytes on a rank.
struct SsmMemory {
  std::size_t rows = 0;      // x, dt, B, C, z and y
  std::size_t states = 0;    // initial and final ones, at the most; of a convolution alone tokens instead
  std::size_t scratch = 0;   // of the kernel, and rows behind a convolution
  std::size_t exchange = 0;  // states that travel

  // What a Ssm allocates; the rest is its caller's.
  std::size_t own() const { return scratch + exchange; }
  std::size_t total() const { return rows + states + scratch + exchange; }
};

// A rank's runs, without the addresses of states.
std::vector<SsmRun> ssm_runs(const Layout& layout, const StateHops& hops, int rank);

struct SsmPlanSummary {
  Layout layout;
  StateHops hops;
  std::vector<SsmMemory> memory;  // [ranks]
  double seconds = 0.0;           // that the rank with most tokens computes, its convolution included
  std::vector<HeadRange> ranges;  // that ranks fold, hand on and finish one behind the other

  const SsmMemory& max_memory() const;
  std::int64_t states_moved() const;  // from rank to rank; of a convolution alone halos
  double balance() const;             // tokens of the rank that has most, over the mean
};

// Seconds in which what sequences hand on goes from the first rank to the last, of one range of heads.
double passing_seconds(const SsmJob& job, const SsmPlanSummary& summary, const MachineModel& machine);

// Before a summary: throws kMemory for a budget (0: none) that can't even hold an equal share of the rows.
void check_ssm_budget(const SsmJob& job, int world, std::size_t budget);
// Throws kMemory for a budget (0: none) that doesn't hold all of it.
void check_budget(const SsmMemory& needed, std::size_t budget);

// `runs`: as SsmOptions has them; `kernel`: null where a convolution is alone; `machine`: of all ranks alike, as they
// choose ranges by it: all heads at a time, or two halves where states would take longer from the first rank to the
// last than halves cost. `conv1d_rate`: operations a second of a convolution in front (conv1d_rate(),
// attention/ssm.hpp). Throws kUsage for runs or lengths that no scan has, and kMemory where check_ssm_size() does.
SsmPlanSummary summarize_ssm_plan(const SsmJob& job, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                                  int world, const SsmKernel* kernel, const MachineModel& machine, double conv1d_rate);

// All heads of a kernel, or two halves of them, by the number of ranges; all where they have no halves.
std::vector<HeadRange> head_ranges(int heads, const SsmKernel& kernel, int ranges);

}  // namespace ringattn
