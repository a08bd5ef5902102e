// SPDX-License-Identifier: Apache-2.0
// Public API of the gradients of exact attention over a ring of ranks: dQ, dK, dV, and the sinks' gradient.
//
//   AttentionBackward backward(job, transport, backward_options(attention));  // collective
//   // all tensors: this rank's rows, as attention.layout() deals them
//   backward.run({q, k, v, out, lse, dout}, {dq, dk, dv}, workspace);         // collective; returns when it is done
//
// Only inputs are sent: K and V to the ranks whose queries see them, and Q, dO and the row stats (LSE
// and delta) to the ranks whose keys they see. Each rank sums the gradients of its own rows, so the bits of dQ, dK and
// dV depend only on the job, the given tensors, the kernel, the device model and the build: not on the number of ranks,
// the layout, blocks, transport or overlap (kernels/attention_backward/attention_backward.hpp has the order of the
// sums).
//
// The gradient of the sinks is a sum over all queries of the batch, in fixed order, and every rank gets it: don't
// reduce it again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "attention/options.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/ring_runs.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/registry.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention/plan_summary.hpp"

namespace ringattn {

struct BackwardJob {
  Job forward;                     // plain keys in rows: no pages, compressed formats, block masks or key positions
  Dtype gradients = Dtype::kBf16;  // dtype of dQ, dK and dV: forward.spec.dtype or fp32
};

// "backward of bf16, …; 1 sequence, 4096 tokens"
std::string describe(const BackwardJob& job);

// Throws kUsage if the job contradicts itself, and kUnsupported for a forward whose gradients can't be computed: pages,
// compressed keys, block masks, key positions.
void check_backward_job(const BackwardJob& job);

// FLOPs of the gradients: 2.5 times those of the forward, as other projects count them. Kernels that compute scores
// once for dQ and again for dK and dV do 3.5 times as many (BackwardPairFlops).
double backward_flops(const BackwardJob& job);

// FLOPs of the matrix products that kernels do per visible (query, key) pair, all heads.
struct BackwardPairFlops {
  double dq = 0.0;
  double dkv = 0.0;
};
BackwardPairFlops backward_pair_flops(const AttentionSpec& spec);

// Tensors of this rank, in the kernel's kind of memory. Strides are free.
struct BackwardInputs {
  TensorView q;                  // [q_rows, heads, head_dim]
  TensorView k;                  // [k_rows, kv_heads, head_dim]
  TensorView v;                  // [k_rows, kv_heads, head_dim_v]
  TensorView out;                // [q_rows, heads, head_dim_v], O of the forward
  RowView lse;                   // [q_rows, heads], LSE of the forward; only read
  TensorView dout;               // [q_rows, heads, head_dim_v], gradient of O
  RowView dlse = {};             // [q_rows, heads], gradient of LSE; no data: 0
  const float* sinks = nullptr;  // [heads], exactly if AttentionSpec::sinks
};

struct BackwardOutputs {
  MutableTensorView dq;     // [q_rows, heads, head_dim]
  MutableTensorView dk;     // [k_rows, kv_heads, head_dim]
  MutableTensorView dv;     // [k_rows, kv_heads, head_dim_v]
  float* dsinks = nullptr;  // [heads], exactly if AttentionSpec::sinks; the sum over all ranks
};

// Options of another op over the same shards. Its kernel is chosen in `backend`, and it has its own machine model.
Options options_over(Options options, const JobLayout& layout, std::string backend);

// The options of a backward pass over the shards of a forward with these options and this layout.
Options backward_options(Options forward, const JobLayout& layout);
Options backward_options(const Attention& attention);

class AttentionBackward {
 public:
  // Collective. Chooses kernel and layout, makes the plan, compares job, options, build, kernel and device with the
  // other ranks, and allocates what runs need besides the caller's workspace. `transport` must outlive the object.
  // Throws Error: kUsage (the job contradicts itself), kUnsupported (no kernel, or ranks differ), kMemory (the budget
  // is too small), kPeer (deadline).
  AttentionBackward(BackwardJob job, Transport& transport, Options options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~AttentionBackward();
  AttentionBackward(AttentionBackward&&) noexcept;
  AttentionBackward& operator=(AttentionBackward&&) = delete;

  const BackwardJob& job() const;
  const Options& options() const;
  const KernelChoice<AttentionBackwardSpec>& kernel() const;
  Backend& backend();
  const JobLayout& layout() const;
  const Plan& plan() const;
  const TimeEstimate& time_estimate() const;
  std::int64_t q_rows() const;  // tokens of this rank's q, out, lse, dout and dq
  std::int64_t k_rows() const;  // tokens of this rank's k, v, dk and dv

  // Bytes that a run needs besides inputs and outputs: row stats, state of dQ, dK and dV, block buffers (on devices the
  // object owns them), and dense copies of q, k, v and dout if they are strided (`dense` false).
  std::size_t workspace_bytes(bool dense = true) const;
  // The part of the workspace that holds the state of dQ, dK and dV; 0 for a plan of one block.
  std::size_t state_bytes() const;

  // Collective. Computes the gradients of this rank's rows. As Attention::run().
  RunStats run(const BackwardInputs& inputs, const BackwardOutputs& outputs, std::span<std::byte> workspace,
               Stream stream = {}, const BlockDone& block_done = {}, RunMode mode = RunMode::kWhole);

  // Enqueues a run without waiting for it, as Attention::enqueue(). Throws kUnsupported if the stream is being
  // captured.
  void enqueue(const BackwardInputs& inputs, const BackwardOutputs& outputs, std::span<std::byte> workspace,
               Stream stream = {});

  // Returns when the device has passed all enqueued runs. Throws their failure.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
