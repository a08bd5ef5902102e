// SPDX-License-Identifier: Apache-2.0
// Public API of the gated delta rule (Gated DeltaNet, Kimi Delta Attention) over sequences that are distributed over
// ranks.
//
//   GatedDelta rule(job, transport, options);  // collective: kernel, config comparison, memory
//   const std::span<const TokenRun> mine = rule.layout().runs(transport.rank());
//   // q, k, v, log_decay and beta: the rows of these tokens, in this order, in the kernel's kind of memory
//   for (int layer = 0; layer < layers; ++layer) rule.enqueue({.q = q, …}, {.out = out}, stream);
//   rule.wait();
//
// A row of o and the final state of a sequence have the same bits on one rank and on many. kernels/gated_delta/
// gated_delta.hpp says what the bits depend on.
//
// A rank has whole segments of 2,048 tokens. It first computes each as a pair (M, U), which needs no other rank. Then
// the state of each sequence that continues on another rank is passed from rank to rank, in order: each applies its
// segments' pairs to it, in the same order as one rank would. If that takes long, heads are split in two halves, as
// those of an SSM (ops/ssm/ssm.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/tokens/gated_delta_job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "ops/ssm/ssm.hpp"

namespace ringattn {

using GatedDeltaChoice = KernelChoice<GatedDeltaSpec>;

// Rows of this rank's tokens, and states, in the kernel's kind of memory. Strides of rows are free. The memory is in
// use until the stream has passed the op.
struct GatedDeltaInputs {
  TensorView q;          // [own tokens, key_heads, key_dim]
  TensorView k;          // [own tokens, key_heads, key_dim]
  TensorView v;          // [own tokens, value_heads, value_dim]
  TensorView log_decay;  // fp32 [own tokens, value_heads, 1], or [own tokens, value_heads, key_dim] with key_decays
  TensorView beta;       // fp32 [own tokens, value_heads, 1]
  // [GatedDelta::beginning() sequences, value_heads, key_dim, value_dim], exactly if GatedDeltaJob::initial_states and
  // this rank has such a sequence.
  const float* initial_states = nullptr;
  // [own tokens], for an update of a pool of states, in the kernel's kind of memory. Row s updates state slots[s] of
  // final_states in place; initial_states is then the same pool (GatedDeltaUpdate::slots).
  const std::int32_t* slots = nullptr;
};

struct GatedDeltaOutputs {
  MutableTensorView out;  // [own tokens, value_heads, value_dim]
  // [GatedDelta::ending() sequences, value_heads, key_dim, value_dim], exactly if GatedDeltaJob::final_states and this
  // rank has such a sequence. An update may pass its initial states here, and then works in place.
  float* final_states = nullptr;
};

// Layout, memory and time of a job, from its shape and kernel. `runs`: as in SsmOptions. `machine`: the same on all
// ranks. `rate`: the kernel's FLOPs a second by the tokens of a rank; null: that of `machine`. `carry_scale`: the time
// of the carry relative to GatedDeltaKernel::carry_seconds(). No ranks run here. Throws kUsage for runs or lengths that
// are not valid, kMemory for too many segments.
SsmPlanSummary summarize_gated_delta_plan(const GatedDeltaJob& job,
                                          const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                                          const GatedDeltaKernel& kernel, const MachineModel& machine,
                                          const RateOfTokens& rate = {}, double carry_scale = 1.0);

class GatedDelta {
 public:
  // Collective. Chooses the kernel, compares job, options, build, kernel and device with the other ranks, and allocates
  // what a run needs. `transport` must outlive the object. Throws Error: kUsage (the job or the runs contradict
  // themselves), kUnsupported (no kernel, or ranks differ), kMemory (the budget is too small), kPeer (deadline).
  // `options.runs`: whole segments.
  GatedDelta(GatedDeltaJob job, Transport& transport, SsmOptions options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~GatedDelta();
  GatedDelta(GatedDelta&&) noexcept;
  GatedDelta& operator=(GatedDelta&&) = delete;

  const GatedDeltaJob& job() const;
  const SsmOptions& options() const;
  const GatedDeltaChoice& kernel() const;
  Backend& backend();
  const Layout& layout() const;
  const SsmMemory& memory() const;  // on the rank that needs most

  // The sequences whose first token this rank has, and those whose last token it has, ascending. An empty sequence is
  // in both lists of one rank (state_owners(), attention/tokens/ssm_layout.hpp).
  const std::vector<std::int32_t>& beginning() const;
  const std::vector<std::int32_t>& ending() const;

  // Compute time of one run on the rank with most tokens, at the kernel's usual rate, and that of the carry: a state
  // passes through the segments of its sequence in order, rank after rank.
  double estimated_seconds() const;
  // Bytes of states that this rank receives in a run.
  std::int64_t bytes_received() const;

  // Collective. Runs once; returns when the stream has completed it. Throws on all ranks: kUsage if shapes don't fit
  // the job or ranks run different jobs, kPeer for a deadline or a dead peer.
  SsmStats run(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream = {});

  // Enqueues a run, as Ssm::enqueue().
  void enqueue(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream = {});

  // Returns when the device has passed all enqueued runs. Throws their failure: kPeer for a deadline or a dead peer.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
