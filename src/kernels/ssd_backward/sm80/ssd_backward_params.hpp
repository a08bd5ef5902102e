// SPDX-License-Identifier: Apache-2.0
// Shared-memory layouts and instantiations of sm80_ssd_backward (kernels/instances.cmake).
#pragma once

#include "kernels/ssd_backward/cuda/ssd_backward_params.hpp"
#include "kernels/ssm/sm80/sm80_ssd.hpp"

namespace ringattn::sm80 {

using cuda::chunk_state_offset;
using cuda::SsdBackwardLauncher;
using cuda::SsdGateParams;
using cuda::SsdGradientRows;
using cuda::SsdRowsParams;
using cuda::SsdStatesParams;

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

// Sums of a head in shared memory, as offsets in floats. There are two buffers: DtGradient reads one while the next
// head's sums are computed. Warps leave as many parts of a sum as there are template arguments.
template <int kStateParts_, int kTokenParts_, int kInnerParts_>
struct SsdSums {
  static constexpr int kStateParts = kStateParts_;
  static constexpr int kTokenParts = kTokenParts_;
  static constexpr int kInnerParts = kInnerParts_;

  static constexpr int kFromStates = 0;                                      // [parts, 64]: a(tokens up to i) · g_i · S · C_i
  static constexpr int kFromGradients = kFromStates + kStateParts * kChunk;  // [parts, 64]: a(tokens after j) · dt_j · x_j · G · B_j
  static constexpr int kOfDt = kFromGradients + kTokenParts * kChunk;        // [parts, 64]: ⟨x_j, G_j · B_j⟩
  static constexpr int kDiagonal = kOfDt + kTokenParts * kChunk;             // [64]: store_diagonal_sums()
  static constexpr int kSkip = kDiagonal + kChunk;                           // [64]: ⟨g_i, x_i⟩
  // Of blocks below the diagonal (block_below()).
  static constexpr int kColumns = kSkip + kChunk;     // [6, 16]
  static constexpr int kRows = kColumns + 6 * 16;     // [6, 16]
  static constexpr int kInner = kRows + 6 * 16;       // [parts]: ⟨S, G⟩
  static constexpr int kSumFloats = kInner + kInnerParts;
};

// A CTA of ssd_rows_kernel: a chunk for a set of heads, one at a time.
template <int kDims, int kStates>
struct SsdRowsShape : SsdSums<4, 2, 8> {
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

extern const SsdBackwardLauncher ssd_backward_bf16_64_64;
extern const SsdBackwardLauncher ssd_backward_bf16_64_128;
extern const SsdBackwardLauncher ssd_backward_bf16_128_64;
extern const SsdBackwardLauncher ssd_backward_bf16_128_128;
extern const SsdBackwardLauncher ssd_backward_fp16_64_64;
extern const SsdBackwardLauncher ssd_backward_fp16_64_128;
extern const SsdBackwardLauncher ssd_backward_fp16_128_64;
extern const SsdBackwardLauncher ssd_backward_fp16_128_128;

}  // namespace ringattn::sm80
