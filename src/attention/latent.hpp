// SPDX-License-Identifier: Apache-2.0
// The library's front door for multi-head latent attention (kernels/latent.hpp). What travels around the ring is the
// latent and the rotary key of a token, which all heads share: with 128 heads 57 times fewer bytes than the keys and
// values that they stand for.
//
//   Latent latent(job, transport, options);   // collective: form, kernels, layout, plan, memory
//   latent.run({.q = q, .latent = c, .k_rope = k_rope, .w_uk = w_uk, .w_uv = w_uv}, {out, lse}, workspace);
//
// Expanded, a block that has arrived is expanded some heads at a time into a workspace inside the memory budget, and
// folded. Absorbed, its rows are folded as they are. O and LSE depend on the job, the form, the kernels, the device
// model and the build alone: not on the number of ranks, blocks, or heads expanded at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "attention/attention.hpp"
#include "attention/options.hpp"
#include "attention/tokens/batch.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/head_product.hpp"
#include "kernels/latent.hpp"

namespace ringattn {

enum class LatentForm { kExpanded, kAbsorbed };
std::string_view form_name(LatentForm form);  // "expanded", "absorbed"

// A job of latent attention, the same on every rank.
struct LatentJob {
  LatentSpec spec;
  Batch batch;
  std::optional<LatentForm> form;  // absent: choose_form()
};

struct FormChoice {
  LatentForm form = LatentForm::kExpanded;
  std::string reason;  // e.g. "16 queries a sequence at most: absorbed up to 170"
};
// The form that costs less, by the shape alone: expanding a key costs as much as folding about 170 queries more the
// other way, at DeepSeek's dims. A pure function of the job, so it never differs between ranks. A form that the job
// names is taken.
FormChoice choose_form(const LatentJob& job);

// This rank's shards, rows as Latent::layout() says; the matrices are whole on every rank. Strides are free. In the
// kernel's kind of memory.
struct LatentInputs {
  TensorView q;                  // [q_rows, heads, head_dim + rope_dim]
  TensorView latent;             // [k_rows, 1, latent_dim]
  TensorView k_rope;             // [k_rows, 1, rope_dim]
  HeadMatrices w_uk;             // [heads, head_dim, latent_dim]
  HeadMatrices w_uv;             // [heads, head_dim_v, latent_dim]
  const float* sinks = nullptr;  // [heads], present exactly when LatentSpec::sinks
};

struct LatentOutputs {
  MutableTensorView out;  // [q_rows, heads, head_dim_v]
  RowView lse;            // [q_rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
};

struct LatentOptions {
  Options ring;  // kernel, layout, blocks, memory, overlap, deadline, as of Attention; lists and state_out aside
  int heads_at_a_time = 0;  // of the expanded form; 0: as many as the memory budget allows. No bit depends on it
};

class Latent {
 public:
  // Prepares. Collective. Throws Error: kUsage (the job contradicts itself), kUnsupported (no kernel; unlike ranks),
  // kMemory (the budget is too small), kPeer (deadline). `transport` outlives the object.
  Latent(LatentJob job, Transport& transport, LatentOptions options);
  ~Latent();
  Latent(Latent&&) noexcept;
  Latent& operator=(Latent&&) = delete;

  const LatentJob& job() const;  // with its form
  const FormChoice& form() const;
  const LatentOptions& options() const;
  int heads_at_a_time() const;
  const FoldChoice& kernel() const;  // what folds
  Backend& backend();
  const JobLayout& layout() const;
  const Plan& plan() const;
  const Prediction& prediction() const;
  std::int64_t q_rows() const;
  std::int64_t k_rows() const;
  std::size_t workspace_bytes() const;

  // As Attention's calls of the same names.
  RunStats run(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> workspace,
               Stream stream = {}, const BlockDone& block_done = {}, RunMode mode = RunMode::kWhole);
  void enqueue(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> workspace,
               Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
