// SPDX-License-Identifier: Apache-2.0
// The library's front door for multi-head latent attention (kernels/mla.hpp). What travels around the ring is the
// latent and the rotary key of a token, which all heads share: with 128 heads 71 times fewer bytes than the keys and
// values that they stand for, and 125 times fewer in rows of 8 bits.
//
//   Mla latent(job, transport, options);   // collective: form, kernels, layout, plan, memory
//   latent.run({.q = q, .latent = c, .k_rope = k_rope, .w_uk = w_uk, .w_uv = w_uv}, {out, lse}, workspace);
//
// Expanded, a block that has arrived is expanded some heads at a time into a workspace inside the memory budget, and
// folded. Absorbed, its rows are folded as they are. O and LSE depend on the job, the form, the kernels, the device
// model and the build alone: not on the number of ranks, blocks, or heads expanded at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "attention/options.hpp"
#include "attention/plan_summary.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/ring_runs.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/mla_job.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/mla.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// This rank's shards, rows as Mla::layout() says; the matrices are whole on every rank. Strides are free: latent and
// k_rope may be views of one [k_rows, latent_dim + rope_dim] tensor, and w_uk and w_uv views of one kv_b_proj,
// [heads · (head_dim + head_dim_v), latent_dim]. In the kernel's kind of memory.
struct MlaInputs {
  // [q_rows, heads, head_dim + rope_dim]; or, in the absorbed form and without w_uk, the queries in the latent already:
  // [q_rows, heads, latent_dim + rope_dim]
  TensorView q;
  TensorView latent;             // [k_rows, 1, latent_dim]
  TensorView k_rope;             // [k_rows, 1, rope_dim]
  GemmWeights w_uk;              // [heads, head_dim, latent_dim]; none where MlaSpec::q_in_latent
  GemmWeights w_uv;              // [heads, head_dim_v, latent_dim]; none: O stays in the latent, in the absorbed form
  const float* sinks = nullptr;  // [heads], present exactly when MlaSpec::sinks
  // Instead of latent and k_rope, exactly where MlaJob::format is not plain: k_rows rows of kernels/latent_rows.hpp,
  // token_stride bytes apart, at even addresses.
  StreamView fp8_rows = {};
};

struct MlaOutputs {
  MutableTensorView out;  // [q_rows, heads, head_dim_v]; without w_uv [q_rows, heads, latent_dim]
  RowView lse;            // [q_rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
};

struct MlaOptions {
  // Kernel, layout, blocks, memory, overlap, deadline, as of Attention. state_out and shorter_lengths are refused.
  Options ring;
  // Of the expanded form: the largest divisor of the heads that is no more than this. 0: as many as fit into 256 MiB of
  // expanded rows, or into what the memory budget leaves where that is less. No bit depends on it.
  int heads_at_a_time = 0;
};

class Mla {
 public:
  // Prepares. Collective. Throws Error: kUsage (the job contradicts itself), kUnsupported (no kernel; unlike ranks),
  // kMemory (the budget is too small), kPeer (deadline). `transport` outlives the object.
  Mla(MlaJob job, Transport& transport, MlaOptions options);
  // Gives up runs that were not waited for; with several ranks that ends the use of the transport.
  ~Mla();
  Mla(Mla&&) noexcept;
  Mla& operator=(Mla&&) = delete;

  const MlaJob& job() const;  // with its form
  const MlaFormChoice& form() const;
  const MlaOptions& options() const;
  int heads_at_a_time() const;            // absorbed: all
  const AttentionChoice& kernel() const;  // what folds
  Backend& backend();
  const JobLayout& layout() const;
  const Plan& plan() const;
  const TimeEstimate& time_estimate() const;
  std::int64_t q_rows() const;
  std::int64_t k_rows() const;
  // Bytes that reach this rank in a run, and that would reach it if K and V of all heads travelled, which is 0 where
  // queries or O are in the latent; for reports.
  std::int64_t bytes_received() const;
  std::int64_t expanded_bytes_received() const;

  // Bytes a run needs beside inputs and outputs: fold state, two blocks (on devices those are the object's own),
  // gathered rows and, absorbed, queries and O in the latent, where MlaSpec doesn't say that the caller has them,
  // or, expanded, rows of 8 bits that are unpacked; and a dense copy of latent and k_rope if several ranks have them,
  // or their rows of 8 bits, strided (`dense_rows` false).
  std::size_t workspace_bytes(bool dense_rows = true) const;

  // As Attention's calls of the same names. Where shapes don't fit the job, all ranks of run() throw kUsage with both
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
