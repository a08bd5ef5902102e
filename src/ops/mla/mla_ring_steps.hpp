// SPDX-License-Identifier: Apache-2.0
// The ring steps of MLA, one for each form. A block's rows are gathered (gathered_blocks.hpp), and then expanded to
// keys and values of some heads at a time, or copied as [c, k_r]. FP8 rows are dequantized once per block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/engine.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"
#include "ops/mla/gathered_blocks.hpp"

namespace ringattn {

// Columns [first, first + count) of every row of a view.
template <class View>
View columns_of(View view, std::int64_t first, std::int64_t count) {
  if (view.data != nullptr) view.data = view.at(0, 0) + first * static_cast<std::int64_t>(size_of(view.dtype));
  view.dim = count;
  return view;
}

// Latents and rotary keys of the same tokens.
struct LatentRows {
  TensorView latent;  // [rows, 1, latent_dim]
  TensorView k_rope;  // [rows, 1, rope_dim]
};

// Memory of a run, for both forms.
struct MlaMemory {
  TensorView q;                        // [q_rows, heads, …]
  std::array<LatentRows, 3> sources;   // this rank's shard, and the two block buffers
  std::array<StreamView, 3> fp8_rows;  // instead of `sources`, FP8 rows
  GemmWeights w_uk;
  GemmWeights w_uv;
  std::byte* state = nullptr;  // if Plan::keeps_state
  AttentionOutput output;
  // In the workspace, sized for the largest block.
  std::byte* keys = nullptr;  // expanded: [rows, heads at a time, head_dim + rope_dim]; absorbed: [rows, 1, latent_dim
                              // + rope_dim]
  std::byte* values = nullptr;       // expanded: [rows, heads at a time, head_dim_v]
  std::byte* dequantized = nullptr;  // expanded, with FP8 rows: [rows, 1, latent_dim + rope_dim]
  std::byte* queries = nullptr;      // absorbed: [q_rows, heads, latent_dim + rope_dim], if w_uk is given
  std::byte* latents = nullptr;      // absorbed: [q_rows, heads, latent_dim], if w_uv is given
};

// The objects that the ring steps use. They outlive the steps.
struct MlaTools {
  const MlaSpec& spec;
  const RowFormat& format;  // MlaJob::format
  const Plan& plan;
  std::span<const GatheredBlock> blocks;   // [blocks of the plan]
  std::span<const PreparedTask> prepared;  // [blocks of the plan], the same for each range of heads
  Backend& backend;
  AttentionKernel& attention;
  BatchedGemmKernel* keys;    // of key_gemm(); may be null
  BatchedGemmKernel* values;  // of value_gemm(); may be null
};

// The states of the ranges of heads are `state_stride` bytes apart.
class ExpandedRingStep final : public RingStep {
 public:
  // `heads`: heads expanded at a time, a divisor of the job's heads.
  ExpandedRingStep(const MlaTools& tools, const MlaMemory& memory, int heads, std::size_t state_stride)
      : tools_(tools), memory_(memory), heads_(heads), state_stride_(state_stride) {}

  void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) override;
  bool finish(Stream, const Progress&) override { return false; }

 private:
  const MlaTools& tools_;
  const MlaMemory& memory_;
  int heads_;
  std::size_t state_stride_;
};

class AbsorbedRingStep final : public RingStep {
 public:
  AbsorbedRingStep(const MlaTools& tools, const MlaMemory& memory);

  void begin(Stream stream, const Progress& progress) override;
  void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) override;
  bool finish(Stream stream, const Progress& progress) override;

 private:
  const MlaTools& tools_;
  const MlaMemory& memory_;
  TensorView q_;            // in the latent space
  AttentionOutput output_;  // in the latent space
};

}  // namespace ringattn
