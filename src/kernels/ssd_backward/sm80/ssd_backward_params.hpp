// SPDX-License-Identifier: Apache-2.0
// Shared-memory layouts of sm80_ssd_backward.
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

// A CTA of ssd_rows_kernel: a chunk for a set of heads, one at a time.
template <int kDims, int kStates>
struct SsdRowsShape : cuda::SsdSums<4, 2, 2, 8, true> {
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
  static constexpr int kMaxBytes = 163 * 1024;  // of an A100
  static constexpr int kStages = layout_bytes(3) <= kMaxBytes ? 3 : layout_bytes(2) <= kMaxBytes ? 2 : 1;
  static constexpr int kC = kBBytes;  // B is at 0
  static constexpr int kScores = 2 * kBBytes;
  static constexpr int kSums = kScores + kChunk * kIntraChunkPitch;
  static constexpr int kDaCumsum = kSums + 2 * kSumFloats * 4;  // [stages + 1]: DtGradient is a head late
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

}  // namespace ringattn::sm80
