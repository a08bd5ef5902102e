// SPDX-License-Identifier: Apache-2.0
// The block steps of latent attention, one for each form. A block's rows are gathered (gathered_blocks.hpp): expanded
// to keys and values of some heads at a time, or put side by side as [c, k_r]. Rows of 8 bits are unpacked once a
// block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/gathered_blocks.hpp"
#include "attention/ring/engine.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/mla.hpp"
#include "kernels/row_format.hpp"

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

// What a run's steps have in common.
struct MlaMemory {
  TensorView q;                        // [q_rows, heads, …]
  std::array<LatentRows, 3> sources;   // this rank's shard, and the two block buffers
  std::array<StreamView, 3> fp8_rows;  // instead of them, of rows of 8 bits
  GemmWeights w_uk;
  GemmWeights w_uv;
  std::byte* state = nullptr;  // where Plan::keeps_state
  AttentionOutput output;
  // Of the workspace, room for the largest block.
  std::byte* keys = nullptr;  // expanded: [rows, heads at a time, head_dim + rope_dim]; absorbed: [rows, 1, latent_dim
                              // + rope_dim]
  std::byte* values = nullptr;    // expanded: [rows, heads at a time, head_dim_v]
  std::byte* unpacked = nullptr;  // expanded, of rows of 8 bits: [rows, 1, latent_dim + rope_dim]
  std::byte* queries = nullptr;   // absorbed: [q_rows, heads, latent_dim + rope_dim], where w_uk is given
  std::byte* latents = nullptr;   // absorbed: [q_rows, heads, latent_dim], where w_uv is given
};

// What steps work with. All of it outlives them.
struct MlaTools {
  const MlaSpec& spec;
  const RowFormat& format;  // of MlaJob
  const Plan& plan;
  std::span<const GatheredBlock> blocks;   // of the plan
  std::span<const PreparedTask> prepared;  // of the plan's blocks, the same for each run of heads
  Backend& backend;
  AttentionKernel& attention;
  BatchedGemmKernel* keys;    // of key_gemm(); null where there is none, as the next
  BatchedGemmKernel* values;  // of value_gemm()
};

// Each run of heads has its part of the state, `state_stride` bytes from the next.
class ExpandedRingStep final : public RingStep {
 public:
  // `heads` at a time divide the job's.
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
  TensorView q_;            // in the latent
  AttentionOutput output_;  // likewise
};

}  // namespace ringattn
