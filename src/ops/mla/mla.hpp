// SPDX-License-Identifier: Apache-2.0
// Public API of multi-head latent attention (kernels/mla/mla.hpp). Ranks exchange the latent and the rotary key of each
// token, which all heads share. With 128 heads these are 71 times fewer bytes than the keys and values expanded from
// them, and 125 times fewer in the FP8 layout.
//
//   Mla mla(job, transport, options);   // collective: form, kernels, layout, plan, memory
//   mla.run({.q = q, .latent = c, .k_rope = k_rope, .w_uk = w_uk, .w_uv = w_uv}, {out, lse}, workspace);
//
// The expanded form expands each block, some heads at a time, into a workspace within the memory budget. The absorbed
// form attends to the latents directly. O and LSE depend only on the job, the form, the kernels, the device model and
// the build, not on the number of ranks, the blocks, or the heads expanded at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "attention/options.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/ring_runs.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/mla_job.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/attention/plan_summary.hpp"

namespace ringattn {

// Tensors of this rank, in the kernel's kind of memory: the rows that Mla::layout() assigns to it, and whole matrices.
// Strides are free: latent and k_rope may be views of one [k_rows, latent_dim + rope_dim] tensor, and w_uk and w_uv
// views of one kv_b_proj, [heads · (head_dim + head_dim_v), latent_dim].
struct MlaInputs {
  // [q_rows, heads, head_dim + rope_dim]; absorbed and without w_uk, queries in the latent space: [q_rows, heads,
  // latent_dim + rope_dim]
  TensorView q;
  TensorView latent;  // [k_rows, 1, latent_dim]
  TensorView k_rope;  // [k_rows, 1, rope_dim]
  GemmWeights w_uk;   // [heads, head_dim, latent_dim]; none if MlaSpec::q_in_latent
  GemmWeights w_uv;   // [heads, head_dim_v, latent_dim]; none (absorbed form only): O stays in the latent space
  const float* sinks = nullptr;  // [heads], exactly if MlaSpec::sinks
  // Instead of latent and k_rope, exactly if MlaJob::format is not plain: [k_rows] FP8 rows
  // (kernels/quant/latent_rows.hpp), token_stride bytes apart, at even addresses.
  StreamView fp8_rows = {};
};

struct MlaOutputs {
  MutableTensorView out;  // [q_rows, heads, head_dim_v]; without w_uv [q_rows, heads, latent_dim]
  RowView lse;            // [q_rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
};

struct MlaOptions {
  // Kernel, layout, blocks, memory, overlap and deadline, as for Attention. state_out and shorter_lengths are refused.
  Options ring;
  // Expanded form: the largest divisor of the heads up to this number is used. 0: as many heads as fit into 256 MiB of
  // expanded rows, or into the rest of the memory budget if that is less. No bit depends on it.
  int heads_at_a_time = 0;
};

class Mla {
 public:
  // Collective. `transport` must outlive the object. Throws Error: kUsage (the job contradicts itself), kUnsupported
  // (no kernel, or ranks differ), kMemory (the budget is too small), kPeer (deadline).
  Mla(MlaJob job, Transport& transport, MlaOptions options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~Mla();
  Mla(Mla&&) noexcept;
  Mla& operator=(Mla&&) = delete;

  const MlaJob& job() const;  // with the chosen form
  const MlaFormChoice& form() const;
  const MlaOptions& options() const;
  int heads_at_a_time() const;            // absorbed: all heads
  const AttentionChoice& kernel() const;  // of the attention
  Backend& backend();
  const JobLayout& layout() const;
  const Plan& plan() const;
  const TimeEstimate& time_estimate() const;
  std::int64_t q_rows() const;
  std::int64_t k_rows() const;
  // Bytes that this rank receives in a run, and bytes that it would receive if K and V of all heads were exchanged. The
  // latter is 0 if queries or O are in the latent space. For reports.
  std::int64_t bytes_received() const;
  std::int64_t expanded_bytes_received() const;

  // Bytes that a run needs besides inputs and outputs: attention state, two block buffers (on devices the object owns
  // them), gathered rows, and a dense copy of latent and k_rope, or of FP8 rows, if several ranks have them strided
  // (`dense_rows` false). Absorbed: also queries and O in the latent space, unless the caller has them. Expanded: also
  // dequantized FP8 rows.
  std::size_t workspace_bytes(bool dense_rows = true) const;

  // As the calls of Attention. If shapes don't fit the job, all ranks of run() throw kUsage, and the message has both
  // shapes.
  RunStats run(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> workspace, Stream stream = {},
               const BlockDone& block_done = {}, RunMode mode = RunMode::kWhole);
  void enqueue(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> workspace, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
