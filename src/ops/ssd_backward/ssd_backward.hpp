// SPDX-License-Identifier: Apache-2.0
// Public API of the gradients of SSD (Mamba-2) over sequences that are distributed over ranks.
//
//   SsdBackward backward(job, transport, options);       // collective: kernel, config comparison, memory
//   // all tensors: this rank's rows, as Ssm::layout() deals them for the same job, in the kernel's kind of memory
//   const SsdParameterGradients parameters = backward.run({x, dt, …, dy}, {dx, ddt, …});  // collective
//
// A rank has whole super-segments of tokens. States are recomputed, and passed from rank to rank as in the forward.
// Then gradients of states are passed in the opposite direction, from the last rank of a sequence to its first.
// Gradients of rows and of initial states have the same bits on any number of ranks
// (kernels/ssd_backward/ssd_backward.hpp says what they depend on).
//
// The gradients of A, D and dt_bias are sums over all tokens of the batch, in fixed order, and every rank gets them:
// don't reduce them again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#include "ops/ssd_backward/parameter_gradients.hpp"
#include "ops/ssm/ssm.hpp"

namespace ringattn {

struct SsdBackwardJob {
  SsmJob forward;                  // whole sequences of SSD, without a convolution
  Dtype gradients = Dtype::kBf16;  // dtype of dx, ddt, dB, dC and dz: forward.spec.dtype or fp32
  bool final_gradients = false;    // gradients of final states are given; else they are zero
};

SsdBackwardSpec backward_spec(const SsdBackwardJob& job);

// "backward of SSD, bf16, …; 1 sequence, 4096 tokens"
std::string describe(const SsdBackwardJob& job);

// Throws kUsage if the job contradicts itself, and kUnsupported for a selective scan, a convolution or a decode step.
void check_ssd_backward_job(const SsdBackwardJob& job);

// FLOPs of the gradients of one token: 2.5 times those of the forward (the forward has two products with each state,
// for y and for the next state; the gradients have five, for dx, dB, dC, the next state and its gradient).
double ssd_backward_token_flops(const SsmSpec& spec);
// Bytes of one token's inputs (with dy) and gradients.
std::int64_t ssd_backward_token_bytes(const SsdBackwardJob& job);

// Layout, memory and time of a job. No ranks run here.
struct SsdBackwardPlan {
  Layout layout;
  StateHops states;               // hops of states
  StateHops gradients;            // hops of their gradients
  std::vector<SsmMemory> memory;  // [ranks]; `rows` has inputs and gradients
  double seconds = 0.0;           // compute time of the rank with the most tokens

  const SsmMemory& max_memory() const;
  std::int64_t states_moved() const;  // states and gradients of states sent between ranks
  std::int64_t states_received(int rank) const;
};
SsdBackwardPlan plan_ssd_backward(const SsdBackwardJob& job,
                                  const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                                  const SsdBackwardKernel& kernel, const MachineModel& machine);

// Rows of this rank's tokens, and states, in the kernel's kind of memory. Strides of rows are free.
struct SsdBackwardInputs {
  TensorView x;                    // [own tokens, heads, head_dim]
  TensorView dt;                   // [own tokens, heads, 1]
  TensorView b;                    // [own tokens, groups, state_dim]
  TensorView c;                    // [own tokens, groups, state_dim]
  TensorView z{};                  // [own tokens, heads, head_dim], exactly if SsmSpec::gate
  TensorView dy;                   // [own tokens, heads, head_dim]
  const float* a = nullptr;        // [heads]
  const float* d = nullptr;        // [heads], exactly if SsmSpec::skip
  const float* dt_bias = nullptr;  // [heads], exactly if SsmSpec::dt_bias
  // [SsdBackward::beginning() sequences, heads, head_dim, state_dim], exactly if SsmJob::initial_states and this rank
  // has such a sequence.
  const float* initial_states = nullptr;
  // [SsdBackward::ending() sequences, heads, head_dim, state_dim], exactly if SsdBackwardJob::final_gradients and this
  // rank has such a sequence.
  const float* final_gradients = nullptr;
};

struct SsdBackwardOutputs {
  MutableTensorView dx;    // [own tokens, heads, head_dim]
  MutableTensorView ddt;   // [own tokens, heads, 1]
  MutableTensorView db;    // [own tokens, groups, state_dim]
  MutableTensorView dc;    // [own tokens, groups, state_dim]
  MutableTensorView dz{};  // [own tokens, heads, head_dim], exactly if SsmSpec::gate
  // As initial_states: exactly if SsmJob::initial_states and this rank has such a sequence.
  float* initial_gradients = nullptr;
};

class SsdBackward {
 public:
  // Collective. As the constructor of Ssm. The options head_ranges and timeline are not used.
  SsdBackward(SsdBackwardJob job, Transport& transport, SsmOptions options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~SsdBackward();
  SsdBackward(SsdBackward&&) noexcept;
  SsdBackward& operator=(SsdBackward&&) = delete;

  const SsdBackwardJob& job() const;
  const SsmOptions& options() const;
  const KernelChoice<SsdBackwardSpec>& kernel() const;
  Backend& backend();
  const Layout& layout() const;
  const SsmMemory& memory() const;  // on the rank that needs most
  double estimated_seconds() const;
  // Bytes of states and of gradients of states that this rank receives in a run.
  std::int64_t bytes_received() const;

  // As in Ssm: the sequences whose initial states, and those whose final states this rank has, ascending.
  const std::vector<std::int32_t>& beginning() const;
  const std::vector<std::int32_t>& ending() const;

  // Collective. Computes all gradients. Throws on all ranks: kUsage if shapes don't fit the job, kPeer for a deadline
  // or a dead peer. `stats` may be null.
  SsdParameterGradients run(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs, Stream stream = {},
                            SsmStats* stats = nullptr);

  // Enqueues a run, as Ssm::enqueue(). The parameters' gradients are those of sum_parameters() after wait().
  void enqueue(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs, Stream stream = {});
  // Returns when the device has passed all enqueued runs. Throws their failure.
  void wait();
  // Collective. The gradients of A, D and dt_bias of the last run, after wait().
  SsdParameterGradients sum_parameters();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
