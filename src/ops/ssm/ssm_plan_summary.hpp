// SPDX-License-Identifier: Apache-2.0
// Layout, memory and time of an SSM or conv1d job, from its shape and kernel. No ranks run here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// Bytes on a rank.
struct SsmMemory {
  std::size_t rows = 0;     // x, dt, B, C, z and y
  std::size_t states = 0;   // upper bound for initial and final states; for a job of conv1d only, for halos
  std::size_t scratch = 0;  // of the kernel, with the convolution's output rows, or RoPE's positions and rows or angles
  std::size_t exchange = 0;  // states sent and received

  // Bytes that the op allocates. The caller owns the rest.
  std::size_t own() const { return scratch + exchange; }
  std::size_t total() const { return rows + states + scratch + exchange; }
};

// The runs of a rank, without addresses of states.
std::vector<SsmRun> ssm_runs(const Layout& layout, const StateHops& hops, int rank);

struct SsmPlanSummary {
  Layout layout;
  StateHops hops;
  std::vector<SsmMemory> memory;  // [ranks]
  // Compute time of the rank with the most tokens, including its convolution. For a gated delta rule also the carry,
  // which all ranks of a sequence compute one after the other.
  double seconds = 0.0;
  std::vector<HeadRange> ranges;  // head ranges that are scanned, passed on and finished one after the other

  const SsmMemory& max_memory() const;
  std::int64_t states_moved() const;  // number of states sent between ranks; for a job of conv1d only, of halos
  double balance() const;             // maximum over mean of the ranks' tokens
};

// Seconds until the states of one head range have passed from the first rank to the last.
double passing_seconds(const SsmJob& job, const SsmPlanSummary& summary, const MachineModel& machine);
// `state_bytes`: of all `heads` of a sequence.
double passing_seconds(int heads, std::int64_t state_bytes, const SsmPlanSummary& summary, const MachineModel& machine);

// A check before the plan is summarized: throws kMemory if the budget (0: none) is too small for an equal share of the
// rows.
void check_ssm_budget(const SsmJob& job, int world, std::size_t budget);
// Throws kMemory if the budget (0: none) is too small.
void check_budget(const SsmMemory& needed, std::size_t budget);

// `runs`: as in SsmOptions. `kernel`: null for a job of conv1d only. `machine`: the same on all ranks. The heads are
// split in two halves if passing the states of all heads takes longer on `machine` than the split costs.
// `conv1d_rate`: operations per second of the convolution before the SSM (conv1d_rate(), ops/ssm/ssm.hpp). `rate`: that
// of `kernel` by the tokens of a rank (ssm_rate()); null: that of `machine`. Throws kUsage for runs or lengths that are
// not valid for an SSM, and kMemory as check_ssm_size() does.
using RateOfTokens = std::function<double(std::int64_t tokens)>;
SsmPlanSummary summarize_ssm_plan(const SsmJob& job, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                                  int world, const SsmKernel* kernel, const MachineModel& machine, double conv1d_rate,
                                  const RateOfTokens& rate = {});

// All heads of a kernel as one range, or as two halves if `ranges` is 2 and the kernel can halve them.
std::vector<HeadRange> head_ranges(int heads, const SsmKernel& kernel, int ranges);
// The same for a kernel whose head ranges begin at multiples of `granule`.
std::vector<HeadRange> head_ranges(int heads, int granule, int ranges);

}  // namespace ringattn
