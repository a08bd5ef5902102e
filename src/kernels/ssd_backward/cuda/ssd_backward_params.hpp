// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of the SSD backward kernels, the launchers that each algorithm has (device_ssd_backward.cpp calls
// them), and the launchers of the kernels that all algorithms share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// Gradients of rows, in the dtype of the inputs or in fp32. Strides count elements.
struct SsdGradientRows {
  void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
  bool aligned;  // rows of each head are aligned to 16 bytes
  bool wide;     // fp32
};

// Offset in elements of a state of a chunk in memory: [kStates / 64, kDims, 64], and in a row of 64 the vectors of
// eight are swizzled as wgmma reads them from shared memory.
template <int kDims>
__host__ __device__ constexpr int chunk_state_offset(int dim, int column) {
  return column / 64 * (kDims * 64) + dim * 64 + (column % 64 / 8 ^ dim % 8) * 8 + column % 8;
}

// States of a batch of segments, in the direction of time or against it. For gradients of states, `scan` has the
// gradients' quantities under the names of the states': x is g, B is C, `initial` is the gradient of the final state,
// `states`, `logs_before` and `super_states` are those after segments and super-segments.
struct SsdStatesParams {
  SsmParams scan;
  std::int32_t first_segment;   // of the launch
  std::int32_t blocks;          // head blocks
  __nv_bfloat16* chunk_states;  // [segments of the batch, chunks, heads of the range], each chunk_state_offset()
};

// Gradients of rows of a batch of segments.
struct SsdRowsParams {
  SsmParams scan;              // of states
  std::int32_t first_segment;  // of the launch
  std::int32_t blocks;         // sets in the range of heads
  std::int32_t set_heads;      // SsdBackwardKernel::heads_together()
  SsmTensor g;                 // gradient of S_t · C_t + D · x_t
  SsdGradientRows dx, ddt;
  const __nv_bfloat16* states;     // before chunks, as in SsdStatesParams
  const __nv_bfloat16* gradients;  // after chunks
  float* set_db;                   // [sets of a group, rows, groups, state_dim], and dC after it
  std::int64_t rows;
  float4* chunk_terms;  // [segments, heads, chunks]: terms of dA, dD and ddt_bias
};

// dz of a batch of segments.
struct SsdGateParams {
  SsmParams scan;
  std::int32_t first_segment;
  std::int32_t blocks;
  std::int32_t set_heads;
  SsmTensor dy;
  SsdGradientRows dz;
  const __nv_bfloat16* states;
};
static_assert(sizeof(SsdRowsParams) <= 4096, "kernel arguments are at most 4 KiB");

// The kernels of one element type, for head_dim up to kDims and state_dim up to kStates. Functions enqueue and throw if
// a launch fails.
struct SsdBackwardLauncher {
  void (*load)();  // loads all kernels onto the current device
  // Local states, or local gradients of states, of all segments of the launch (SsdStatesParams::chunk_states unused).
  void (*accumulate)(const SsdStatesParams& params, bool reversed, int multiprocessors, cudaStream_t stream);
  // Local gradients with a gate: computes g = dy · silu(z) and stores it to SsdStatesParams::scan.x. False if it
  // cannot, for these tensors: then gate_gradients() and accumulate() do.
  bool (*accumulate_gated)(const SsdStatesParams& params, const SsmTensor& dy, int multiprocessors,
                           cudaStream_t stream);
  // States before chunks, or gradients after chunks, of a batch of segments.
  void (*expand)(const SsdStatesParams& params, bool reversed, int segments, int multiprocessors, cudaStream_t stream);
  void (*rows)(const SsdRowsParams& params, int segments, cudaStream_t stream);
  void (*gate)(const SsdGateParams& params, int segments, int multiprocessors, cudaStream_t stream);
};

// Sums of a head in shared memory, as offsets in floats. There are several buffers: DtGradient reads one while the next
// heads' sums are computed. The first four template arguments are the numbers of parts that warps store of each sum.
// kBlockSums_: whether there are block sums, too (kWithin).
template <int kStateParts_, int kTokenParts_, int kDtParts_, int kInnerParts_, bool kBlockSums_>
struct SsdSums {
  static constexpr int kStateParts = kStateParts_;
  static constexpr int kTokenParts = kTokenParts_;
  static constexpr int kDtParts = kDtParts_;
  static constexpr int kInnerParts = kInnerParts_;
  static constexpr bool kBlockSums = kBlockSums_;

  // [parts, 64]: a(tokens up to i) · g_i · S · C_i, and a(tokens after j) · dt_j · x_j · G · B_j.
  static constexpr int kFromStates = 0;
  static constexpr int kFromGradients = kFromStates + kStateParts * kChunk;
  static constexpr int kOfDt = kFromGradients + kTokenParts * kChunk;  // [parts, 64]: ⟨x_j, G_j · B_j⟩
  // [64]: Σ_{j < t ≤ i} w_ij. With kBlockSums only of the 16 × 16 blocks on the diagonal (store_diagonal_sums()).
  static constexpr int kWithin = kOfDt + kDtParts * kChunk;
  static constexpr int kSkip = kWithin + kChunk;  // [64]: ⟨g_i, x_i⟩
  // Sums of the blocks below the diagonal (block_below()).
  static constexpr int kBlockFloats = kBlockSums ? 6 * 16 : 0;
  static constexpr int kColumns = kSkip + kChunk;        // [6, 16]
  static constexpr int kRows = kColumns + kBlockFloats;  // [6, 16]
  static constexpr int kInner = kRows + kBlockFloats;    // [parts]: ⟨S, G⟩
  static constexpr int kSumFloats = kInner + kInnerParts;
};

// Sums of partial results, and the gradient of rows before the gate (sums.cu).

// dB and dC: sets ascending.
struct SsdSumParams {
  SsmParams scan;
  const float* set_db;  // [sets, rows, groups, state_dim], and dC after it
  std::int64_t rows;
  std::int32_t sets, groups;
  SsdGradientRows db, dc;
};
void load_ssd_sums(Dtype dtype);
void sum_head_sets(const SsdSumParams& params, Dtype dtype, cudaStream_t stream);
// Terms of segments: chunks ascending. `terms` is [segments of the task, heads, 3].
void sum_chunk_terms(const SsmParams& params, const float4* chunk_terms, float* terms, cudaStream_t stream);
// g = dy · silu(z), rounded to the dtype of the inputs. SsmParams::x is dy.
void gate_gradients(const SsmParams& params, const SsmTensor& g, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::cuda

// The compiled kernels of sm80_ssd_backward.
namespace ringattn::sm80 {

extern const cuda::SsdBackwardLauncher ssd_backward_bf16_64_64;
extern const cuda::SsdBackwardLauncher ssd_backward_bf16_64_128;
extern const cuda::SsdBackwardLauncher ssd_backward_bf16_128_64;
extern const cuda::SsdBackwardLauncher ssd_backward_bf16_128_128;
extern const cuda::SsdBackwardLauncher ssd_backward_fp16_64_64;
extern const cuda::SsdBackwardLauncher ssd_backward_fp16_64_128;
extern const cuda::SsdBackwardLauncher ssd_backward_fp16_128_64;
extern const cuda::SsdBackwardLauncher ssd_backward_fp16_128_128;

}  // namespace ringattn::sm80
