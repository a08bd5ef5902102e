// SPDX-License-Identifier: Apache-2.0
// Public API of the gradients of expanded MLA (kernels/mla/mla.hpp) over a ring of ranks: those of q, latent, k_rope,
// w_uk and w_uv, and of sinks.
//
//   MlaBackward backward(mla.job(), transport, mla_backward_options(mla));   // collective
//   // all tensors: this rank's rows, as mla.layout() deals them, and whole matrices
//   backward.run({q, latent, k_rope, w_uk, w_uv, out, lse, dout}, outputs, workspace);   // collective
//
// Keys and values are expanded from the rank's own latents, some heads at a time, and AttentionBackward computes dQ, dK
// and dV. dK and dV are rounded to the dtype, as in any chain of layers. Then
//
//   dlatent = Σ_heads dK_nope[h] · w_uk[h] + dV[h] · w_uv[h]     dk_rope = Σ_heads dK_rope[h]
//   dw_uk[h] = Σ_tokens dK_nope[h] ⊗ latent                      dw_uv[h] = Σ_tokens dV[h] ⊗ latent
//
// dlatent and dk_rope are one GEMM each, whose sum over heads and dims is in K order and is rounded once. So gradients
// of rows are pure functions of the sequence, as dQ, dK and dV are. Gradients of the matrices are sums over the batch,
// in fp32 and in units of tokens (kernels/common/token_units.hpp). For them each rank receives dK, dV and the latents
// of all tokens for its share of the heads. Every rank gets the whole gradients of matrices and sinks, which are the
// sums over all ranks: don't reduce them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ops/attention_backward/attention_backward.hpp"
#include "ops/mla/mla.hpp"

namespace ringattn {

// Tensors of this rank, in the kernel's kind of memory. Strides are free, but the last axis of matrices is contiguous.
struct MlaBackwardInputs {
  TensorView q;                  // [q_rows, heads, head_dim + rope_dim]
  TensorView latent;             // [k_rows, 1, latent_dim]
  TensorView k_rope;             // [k_rows, 1, rope_dim]
  GemmWeights w_uk;              // [heads, head_dim, latent_dim]
  GemmWeights w_uv;              // [heads, head_dim_v, latent_dim]
  TensorView out;                // [q_rows, heads, head_dim_v], O of the forward
  RowView lse;                   // [q_rows, heads], LSE of the forward; only read
  TensorView dout;               // [q_rows, heads, head_dim_v], gradient of O
  RowView dlse = {};             // [q_rows, heads], gradient of LSE; no data: 0
  const float* sinks = nullptr;  // [heads], exactly if MlaSpec::sinks
};

struct MlaBackwardOutputs {
  MutableTensorView dq;       // [q_rows, heads, head_dim + rope_dim] of the dtype
  MutableTensorView dlatent;  // [k_rows, 1, latent_dim] of the dtype
  MutableTensorView dk_rope;  // [k_rows, 1, rope_dim] of the dtype
  float* dw_uk = nullptr;     // [heads, head_dim, latent_dim]
  float* dw_uv = nullptr;     // [heads, head_dim_v, latent_dim]
  float* dsinks = nullptr;    // [heads], exactly if MlaSpec::sinks
};

// The options of a backward pass over the shards of `mla`.
MlaOptions mla_backward_options(const Mla& mla);

class MlaBackward {
 public:
  // Collective. MlaOptions::heads_at_a_time is the largest divisor of the heads up to this number; 0: as many heads as
  // fit into 256 MiB of K, V, dK and dV. No bit depends on it. `transport` must outlive the object. Throws Error:
  // kUsage (the job contradicts itself), kUnsupported (the absorbed form, FP8 latents, a memory budget, no kernel, or
  // ranks differ), kMemory, kPeer (deadline).
  MlaBackward(MlaJob job, Transport& transport, MlaOptions options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~MlaBackward();
  MlaBackward(MlaBackward&&) noexcept;
  MlaBackward& operator=(MlaBackward&&) = delete;

  const MlaJob& job() const;  // with its form
  int heads_at_a_time() const;
  const KernelChoice<AttentionBackwardSpec>& kernel() const;
  Backend& backend();
  const JobLayout& layout() const;
  std::int64_t q_rows() const;
  std::int64_t k_rows() const;

  // Bytes that a run needs besides inputs and outputs.
  std::size_t workspace_bytes() const;

  // Collective. Computes the gradients; returns when they are written.
  void run(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs, std::span<std::byte> workspace,
           Stream stream = {});

  // Enqueues a run without waiting for it, and waits for all of them, as AttentionBackward: kUnsupported if the
  // stream is being captured. Several ranks with host memory return when the run is done.
  void enqueue(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs, std::span<std::byte> workspace,
               Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
