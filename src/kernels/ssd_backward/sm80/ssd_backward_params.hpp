// SPDX-License-Identifier: Apache-2.0
// Kernel parameters and shared-memory layouts of sm80_ssd_backward. kernels/instances.cmake lists the instantiations,
// and sm80_ssd_backward.cpp launches them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/sm80/sm80_ssd.hpp"

namespace ringattn::sm80 {

// Gradients of rows, in the dtype of the inputs or in fp32. Strides count elements.
struct SsdGradientRows {
  void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
  bool aligned;  // rows of each head are aligned to 16 bytes
  bool wide;     // fp32
};

// States of a batch of segments, in the direction of time or against it. For gradients of states, `scan` has the
// gradients' quantities under the names of the states': x is g, B is C, `initial` is the gradient of the final state,
// `states`, `logs_before` and `super_states` are those after segments and super-segments.
struct SsdStatesParams {
  SsmParams scan;
  std::int32_t first_segment;   // of the launch
  std::int32_t blocks;          // head blocks
  __nv_bfloat16* chunk_states;  // [segments of the batch, chunks, heads of the range, kDims, kStates]
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

// A CTA of ssd_states_kernel: eight warps, each with 16 dims of a head.
template <int kDims, int kStates>
struct SsdStatesShape {
  static constexpr int kThreads = 256;
  static constexpr int kHeadWarps = kDims / kWarpDims;
  static constexpr int kHeads = kThreads / 32 / kHeadWarps;
  static constexpr int kStages = 3;

  static constexpr int kXPitch = pitch_of(kDims);
  static constexpr int kBPitch = pitch_of(kStates);
  // Offsets in a pipeline stage.
  static constexpr int kX = kChunk * kBPitch;  // [heads]; B is at 0
  static constexpr int kXBytes = kChunk * kXPitch;
  static constexpr int kDaCumsum = kX + kHeads * kXBytes;  // [heads]
  static constexpr int kDaCumsumBytes = kChunkDaCumsumFloats * 4;
  static constexpr int kStageBytes = kDaCumsum + kHeads * kDaCumsumBytes;
  static constexpr int kBytes = kStages * kStageBytes;
};

// A CTA of ssd_rows_kernel: a chunk for a set of heads, one at a time.
template <int kDims, int kStates>
struct SsdRowsShape {
  static constexpr int kThreads = 512;  // two groups of eight warps
  static constexpr int kGroupThreads = 256;

  static constexpr int kXPitch = pitch_of(kDims);
  static constexpr int kBPitch = pitch_of(kStates);
  static constexpr int kBBytes = kChunk * kBPitch;
  static constexpr int kXBytes = kChunk * kXPitch;
  static constexpr int kStateBytes = kDims * kBPitch;
  // Offsets in a pipeline stage: of one head.
  static constexpr int kG = kXBytes;
  static constexpr int kState = 2 * kXBytes;
  static constexpr int kGradient = kState + kStateBytes;
  static constexpr int kStageBytes = kGradient + kStateBytes;

  // Sums of a head, in floats, in two buffers: finish_head() reads one while the next head's are computed.
  static constexpr int kFromStates = 0;                            // [4, 64]
  static constexpr int kFromGradients = kFromStates + 4 * kChunk;  // [2, 64]
  static constexpr int kOfDt = kFromGradients + 2 * kChunk;        // [2, 64]
  static constexpr int kDiagonal = kOfDt + 2 * kChunk;             // [64]
  static constexpr int kSkip = kDiagonal + kChunk;                 // [64]
  static constexpr int kColumns = kSkip + kChunk;                  // [6, 16]
  static constexpr int kRows = kColumns + 6 * 16;                  // [6, 16]
  static constexpr int kInner = kRows + 6 * 16;                    // [8]
  static constexpr int kSumFloats = kInner + 8;

  static constexpr int layout_bytes(int stages) {
    return 2 * kBBytes + kChunk * kIntraChunkPitch + 2 * kSumFloats * 4 + stages * kStageBytes +
           (stages + 1) * kChunkDaCumsumFloats * 4;
  }
  static constexpr int kMaxBytes = 227 * 1024;
#ifndef ROW_STAGES
#define ROW_STAGES 3
#endif
  static constexpr int kStages = layout_bytes(ROW_STAGES) <= kMaxBytes ? ROW_STAGES : layout_bytes(2) <= kMaxBytes ? 2 : 1;
  static constexpr int kC = kBBytes;  // B is at 0
  static constexpr int kScores = 2 * kBBytes;
  static constexpr int kSums = kScores + kChunk * kIntraChunkPitch;
  static constexpr int kDaCumsum = kSums + 2 * kSumFloats * 4;  // [stages + 1]: finish_head() is a head late
  static constexpr int kHead = kDaCumsum + (kStages + 1) * kChunkDaCumsumFloats * 4;  // [stages]
  static constexpr int kBytes = kHead + kStages * kStageBytes;
  static_assert(kBytes == layout_bytes(kStages) && kBytes <= kMaxBytes);
};

// A CTA of ssd_gate_kernel: a chunk for a set of heads, one at a time.
template <int kDims, int kStates>
struct SsdGateShape {
  static constexpr int kThreads = 256;
  static constexpr int kStages = 2;

  static constexpr int kXPitch = pitch_of(kDims);
  static constexpr int kBPitch = pitch_of(kStates);
  static constexpr int kBBytes = kChunk * kBPitch;
  static constexpr int kState = kChunk * kXPitch;  // in a pipeline stage, in which x is at 0
  static constexpr int kDaCumsum = kState + kDims * kBPitch;
  static constexpr int kStageBytes = kDaCumsum + kChunkDaCumsumFloats * 4;
  static constexpr int kC = kBBytes;
  static constexpr int kScores = 2 * kBBytes;
  static constexpr int kHead = kScores + kChunk * kIntraChunkPitch;
  static constexpr int kBytes = kHead + kStages * kStageBytes;
};

// The kernels of one element type, for head_dim up to kDims and state_dim up to kStates. Functions enqueue and throw if
// a launch fails.
struct SsdBackwardLauncher {
  void (*load)();  // loads all kernels onto the current device
  // Local states, or local gradients of states, of all segments of the launch (SsdStatesParams::chunk_states unused).
  void (*accumulate)(const SsdStatesParams& params, bool reversed, cudaStream_t stream);
  // States before chunks, or gradients after chunks, of a batch of segments.
  void (*expand)(const SsdStatesParams& params, bool reversed, int segments, cudaStream_t stream);
  void (*rows)(const SsdRowsParams& params, int segments, cudaStream_t stream);
  void (*gate)(const SsdGateParams& params, int segments, cudaStream_t stream);
};

extern const SsdBackwardLauncher ssd_backward_bf16_64_64;
extern const SsdBackwardLauncher ssd_backward_bf16_64_128;
extern const SsdBackwardLauncher ssd_backward_bf16_128_64;
extern const SsdBackwardLauncher ssd_backward_bf16_128_128;
extern const SsdBackwardLauncher ssd_backward_fp16_64_64;
extern const SsdBackwardLauncher ssd_backward_fp16_64_128;
extern const SsdBackwardLauncher ssd_backward_fp16_128_64;
extern const SsdBackwardLauncher ssd_backward_fp16_128_128;

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

}  // namespace ringattn::sm80
