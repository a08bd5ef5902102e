// SPDX-License-Identifier: Apache-2.0
// The library's front door for scans of state space layers (Mamba-1 and Mamba-2), over sequences that ranks share.
//
//   Ssm scan(job, transport, options);       // collective: kernel, agreement, memory
//   const std::span<const TokenRun> mine = scan.layout().runs(transport.rank());
//   // x, dt, B, C, z: the rows of these tokens, in this order, in the kernel's kind of memory
//   for (int layer = 0; layer < layers; ++layer) scan.enqueue({.x = x, …}, {.y = y}, stream);
//   scan.wait();
//
// A row of y, and the final state of a sequence, have the same bits on one rank and on many (kernels/ssm.hpp says what
// they are functions of).
//
// SsmJob::convolution has the causal convolution done in front of the scan. SsmJob::update makes one token of each
// sequence the whole job: a step of decoding. SsmJob::alone leaves the convolution only.
//
// A rank has whole super-segments of tokens. It folds them from nothing, and one state of each sequence that goes on
// elsewhere travels from rank to rank, in order. Where that takes long, heads are taken in two halves: while the states
// of one travel, ranks work on the other, and hand on what has arrived meanwhile (attention/state_relay.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/ssm_plan_summary.hpp"
#include "attention/ssm_timeline.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/registry.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

using SsmChoice = KernelChoice<SsmSpec>;

// The kernel that a job rests on: the scan's, or the convolution's where that is alone.
struct SsmJobChoice {
  const KernelEntry* row = nullptr;
  const KernelRow<SsmSpec>* ssm = nullptr;  // `row`, or null for a convolution alone
  std::string reason;
};
SsmJobChoice choose_kernel(const SsmJob& job, const KernelRequest& request,
                           KernelScope scope = KernelScope::kThisMachine);
// Operations a second of the convolution in front of a scan, by the kernel that is chosen for it beside the scan's; 0
// where none stands in front.
double conv1d_rate(const SsmJob& job, const SsmJobChoice& choice, const Backend& backend,
                   KernelScope scope = KernelScope::kThisMachine);

// How a job is done. Nothing here changes a bit of the result.
struct SsmOptions {
  KernelRequest kernel;
  // The caller's own distribution: for each rank its tokens, in whole super-segments of their sequences. Without one,
  // ranks get neighbouring super-segments.
  std::optional<std::vector<std::vector<TokenRun>>> runs;
  std::size_t memory_budget = 0;  // bytes a rank may use, rows and states included; 0: no limit
  int threads = 0;                // of a host kernel; 0: this rank's share of the processors it may use
  // Of a wait for a peer that should be ready and gives no signs of life.
  double timeout_seconds = 60.0;
  // 1: all heads are scanned at a time; 2: in two halves, where they have any; 0: as summarize_ssm_plan() chooses.
  int head_ranges = 0;
  bool timeline = false;  // run() also tells when each part was done, at the cost of marks between them
};

// The rows of this rank's tokens, and states, in the kernel's kind of memory; strides of rows are free. In use until
// the stream has passed the scan. With SsmJob::convolution x is what stands in front of it, [own tokens, 1, channels]:
// x alone with SsmSpec::state_decays, else x, B and C side by side, and then b and c are absent. With SsmJob::alone
// there are x and what the convolution has.
struct SsmInputs {
  TensorView x;                    // [own tokens, heads, head_dim]
  TensorView dt;                   // [own tokens, heads, 1]
  TensorView b;                    // [own tokens, groups, state_dim]
  TensorView c;                    // [own tokens, groups, state_dim]
  TensorView z{};                  // [own tokens, heads, head_dim], present exactly when SsmSpec::gate
  const float* a = nullptr;        // [heads], or [heads, state_dim] with SsmSpec::state_decays
  const float* d = nullptr;        // [heads], present exactly when SsmSpec::skip
  const float* dt_bias = nullptr;  // [heads], present exactly when SsmSpec::dt_bias
  // [Ssm::beginning() sequences, heads, head_dim, state_dim], present exactly when SsmJob::initial_states and this
  // rank has such a sequence.
  const float* initial_states = nullptr;
  // Present exactly when SsmJob::convolution, as CausalConv1dInputs has them.
  const float* conv_weight = nullptr;   // [channels, width]
  const float* conv_bias = nullptr;     // [channels], present exactly when CausalConv1dSpec::bias
  const void* initial_halos = nullptr;  // present exactly when SsmJob::initial_halos and a sequence begins here
  // [own tokens], in the kernel's kind of memory: of an update without a convolution whose states are one of many. Row
  // s goes on in place in state slots[s] of final_states, which initial_states are then, too (SsmUpdate::slots).
  const std::int32_t* slots = nullptr;
};

struct SsmOutputs {
  MutableTensorView y;  // [own tokens, heads, head_dim]
  // [Ssm::ending() sequences, heads, head_dim, state_dim], present exactly when SsmJob::final_states and this rank
  // has such a sequence. An update may have its initial states here, and is then done in place.
  float* final_states = nullptr;
  void* final_halos = nullptr;  // as CausalConv1dOutputs has them; with SsmJob::final_halos
};

class Ssm {
 public:
  // Prepares. Collective. Chooses the kernel, agrees with the other ranks on job, options, build, kernel and device,
  // and allocates what a scan needs. Throws Error: kUsage (the job or the runs contradict themselves), kUnsupported (no
  // kernel; unlike ranks), kMemory (the budget is too small), kPeer (deadline). `transport` outlives the object.
  Ssm(SsmJob job, Transport& transport, SsmOptions options);
  // Gives up scans that were not waited for; with several ranks that ends the use of the transport.
  ~Ssm();
  Ssm(Ssm&&) noexcept;
  Ssm& operator=(Ssm&&) = delete;

  const SsmJob& job() const;
  const SsmOptions& options() const;
  const SsmJobChoice& kernel() const;
  Backend& backend();
  const Layout& layout() const;
  const SsmMemory& memory() const;  // on the rank that needs most

  // The sequences whose first token this rank has, and those whose last it has, ascending. An empty sequence is in both
  // lists of one rank (state_owners(), attention/tokens/ssm_layout.hpp).
  const std::vector<std::int32_t>& beginning() const;
  const std::vector<std::int32_t>& ending() const;

  // Of one scan, by the kernel's usual rate, on the rank that has most tokens.
  double estimated_seconds() const;
  // Bytes of states that this rank receives in a scan; of a convolution alone of tokens.
  std::int64_t bytes_received() const;

  // Collective. Does one scan; the work on `stream` is complete when it returns, and so is what was enqueued before.
  // Throws, on all ranks alike, kUsage where shapes don't fit the job; kPeer for a deadline or a dead peer.
  SsmStats run(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream = {});

  // The same without the waiting: no collective, no allocation, no wait for the device. Every rank enqueues the same
  // scans in the same order, on streams that follow each other: they share the object's memory. Layers of a model may
  // share one object. kUsage is thrown here alone, before anything is enqueued. A host kernel does the work before this
  // returns. A stream that is being captured gets the scan as part of its graph; kUnsupported with several ranks.
  void enqueue(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream = {});

  // Returns when the device has passed every scan that was enqueued; at once if there is none. Throws what they failed
  // with: kPeer for a deadline or a dead peer.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
