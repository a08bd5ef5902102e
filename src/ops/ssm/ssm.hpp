// SPDX-License-Identifier: Apache-2.0
// Public API of SSM layers (Mamba-1 and Mamba-2) over sequences that are distributed over ranks.
//
//   Ssm ssm(job, transport, options);       // collective: kernel, config comparison, memory
//   const std::span<const TokenRun> mine = ssm.layout().runs(transport.rank());
//   // x, dt, B, C, z: the rows of these tokens, in this order, in the kernel's kind of memory
//   for (int layer = 0; layer < layers; ++layer) ssm.enqueue({.x = x, …}, {.y = y}, stream);
//   ssm.wait();
//
// A row of y and the final state of a sequence have the same bits on one rank and on many. kernels/ssm/ssm.hpp says
// what the bits depend on.
//
// Linear attention (SsmDecay) takes v for x, k for B, q for C, and log-decays for dt or A.
//
// SsmJob::convolution adds the causal conv1d before the SSM. SsmJob::update is a decode step: one token of each
// sequence. SsmJob::conv1d_only runs only the convolution.
//
// A rank has whole super-segments of tokens. It first scans them from a zero state. Then one state of each sequence
// that continues on another rank is passed from rank to rank, in order. If that takes long, heads are split in two
// halves: while the states of one half are in flight, ranks compute the other half (ops/ssm/state_relay.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssm/ssm.hpp"
#include "ops/ssm/ssm_plan_summary.hpp"
#include "ops/ssm/ssm_timeline.hpp"

namespace ringattn {

using SsmChoice = KernelChoice<SsmSpec>;

// The kernel of a job: the SSM kernel, or the conv1d kernel if the job has only the convolution.
struct SsmJobChoice {
  const KernelEntry* row = nullptr;
  const KernelRow<SsmSpec>* ssm = nullptr;  // `row`, or null for a convolution only
  std::string reason;
};
SsmJobChoice choose_kernel(const SsmJob& job, const KernelRequest& request,
                           KernelScope scope = KernelScope::kThisMachine);
// FLOP/s of the kernel on a rank with `tokens`, as ssm_token_flops() counts, on the given machine.
double ssm_rate(const SsmJob& job, const SsmJobChoice& choice, const Backend& backend, std::int64_t tokens,
                const MachineModel& given = {});
// Operations per second of the convolution before an SSM, by the kernel that is chosen for it; 0 without a convolution.
double conv1d_rate(const SsmJob& job, const SsmJobChoice& choice, const Backend& backend,
                   KernelScope scope = KernelScope::kThisMachine, const MachineModel& given = {});

// Options of a job. Only the kernel may change bits of the result.
struct SsmOptions {
  KernelRequest kernel;
  // The caller's own distribution: for each rank its tokens, in whole super-segments of their sequences. Without it,
  // ranks get adjacent super-segments.
  std::optional<std::vector<std::vector<TokenRun>>> runs;
  std::size_t memory_budget = 0;  // bytes a rank may use, rows and states included; 0: no limit
  int threads = 0;                // of a host kernel; 0: this rank's share of the processors it may use
  // Timeout of a wait for a peer that should be ready and sends no heartbeats.
  double timeout_seconds = 60.0;
  // 1: all heads at a time; 2: two halves, if the kernel can halve them; 0: summarize_ssm_plan() chooses.
  int head_ranges = 0;
  bool timeline = false;  // run() also returns when each phase was done; records events between the phases
};

// Rows of this rank's tokens, and states, in the kernel's kind of memory. Strides of rows are free. The memory is in
// use until the stream has passed the SSM. With SsmJob::convolution, x is the convolution's input, [own tokens, 1,
// channels]: only x with SsmSpec::state_decays, else x, B and C side by side, and then b and c are absent. With
// SsmJob::conv1d_only only x and the members of the convolution are given.
struct SsmInputs {
  TensorView x;                    // [own tokens, heads, head_dim]
  TensorView dt;                   // [own tokens, heads, dt_rows()]: dt or log-decays; absent with SsmDecay::kHead
  TensorView b;                    // [own tokens, groups, state_dim]
  TensorView c;                    // [own tokens, groups, state_dim]
  TensorView z{};                  // [own tokens, heads, head_dim], exactly if SsmSpec::gate
  const float* a = nullptr;        // [heads], or [heads, state_dim] with SsmSpec::state_decays; as in SsmTask
  const float* d = nullptr;        // [heads], exactly if SsmSpec::skip
  const float* dt_bias = nullptr;  // [heads], exactly if SsmSpec::dt_bias
  // [Ssm::beginning() sequences, heads, head_dim, state_dim], exactly if SsmJob::initial_states and this rank has such
  // a sequence.
  const float* initial_states = nullptr;
  // Exactly if SsmJob::convolution, as in CausalConv1dInputs.
  const float* conv_weight = nullptr;   // [channels, width]
  const float* conv_bias = nullptr;     // [channels], exactly if CausalConv1dSpec::bias
  const void* initial_halos = nullptr;  // exactly if SsmJob::initial_halos and a sequence begins here
  // [own tokens], for an update without a convolution on a pool of states, in the kernel's kind of memory. Row s
  // updates state slots[s] of final_states in place; initial_states is then the same pool (SsmUpdate::slots).
  const std::int32_t* slots = nullptr;
  // Positions of [own tokens], only with SsmJob::rope, in the kernel's kind of memory. Without values tokens count from
  // 0 in their sequences; an update must give values.
  RopePositions positions = {};
};

struct SsmOutputs {
  MutableTensorView y;  // [own tokens, heads, head_dim]
  // [Ssm::ending() sequences, heads, head_dim, state_dim], exactly if SsmJob::final_states and this rank has such a
  // sequence. An update may pass its initial states here, and then works in place.
  float* final_states = nullptr;
  void* final_halos = nullptr;  // as in CausalConv1dOutputs, exactly if SsmJob::final_halos
};

class Ssm {
 public:
  // Collective. Chooses the kernel, compares job, options, build, kernel and device with the other ranks, and allocates
  // what a run needs. `transport` must outlive the object. Throws Error: kUsage (the job or the runs contradict
  // themselves), kUnsupported (no kernel, or ranks differ), kMemory (the budget is too small), kPeer (deadline).
  Ssm(SsmJob job, Transport& transport, SsmOptions options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~Ssm();
  Ssm(Ssm&&) noexcept;
  Ssm& operator=(Ssm&&) = delete;

  const SsmJob& job() const;
  const SsmOptions& options() const;
  const SsmJobChoice& kernel() const;
  Backend& backend();
  const Layout& layout() const;
  const SsmMemory& memory() const;  // on the rank that needs most

  // The sequences whose first token this rank has, and those whose last token it has, ascending. An empty sequence is
  // in both lists of one rank (state_owners(), attention/tokens/ssm_layout.hpp).
  const std::vector<std::int32_t>& beginning() const;
  const std::vector<std::int32_t>& ending() const;

  // Compute time of one run on the rank with most tokens, at the kernel's usual rate.
  double estimated_seconds() const;
  // Bytes that a run reads and writes for each token, also of its convolution and RoPE.
  std::int64_t token_bytes() const;
  // Bytes of states, or of halos if there is only a convolution, that this rank receives in a run.
  std::int64_t bytes_received() const;

  // Collective. Runs once; returns when the stream has completed it. Throws on all ranks: kUsage if shapes don't fit
  // the job or ranks run different jobs, kPeer for a deadline or a dead peer.
  SsmStats run(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream = {});

  // Enqueues a run: not collective, no allocation, no wait for the device. Every rank enqueues the same runs in the
  // same order, on streams that are ordered among themselves, because runs share the object's memory. Layers of a model
  // may share one object. kUsage is thrown only on this rank, before anything is enqueued. A host kernel has done the
  // work on return. If the stream is being captured, the run becomes part of the graph; kUnsupported with several
  // ranks.
  void enqueue(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream = {});

  // Returns when the device has passed all enqueued runs. Throws their failure: kPeer for a deadline or a dead peer.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
