// SPDX-License-Identifier: Apache-2.0
// Kernel parameters and shared-memory layout of the rows kernel of sm90_ssd_backward.
#pragma once

#include <cuda.h>

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/ssd_backward/cuda/ssd_backward_params.hpp"

namespace ringattn::sm90 {

using cuda::kChunk;
using cuda::kChunkDaCumsumFloats;
using cuda::kChunksOfSegment;

using Bf16 = __nv_bfloat16;

inline constexpr int kRowsDims = 64;  // head_dim
inline constexpr int kRowsThreads = 512;
inline constexpr int kRowsOfWarp = 16;  // tokens
// Registers per thread after setmaxnreg, from 128 each at launch.
inline constexpr int kRowsProducerRegisters = 64;
inline constexpr int kRowsScoreRegisters = 144;
inline constexpr int kRowsTokenRegisters = 96;
inline constexpr int kRowsSetRegisters = 208;

struct HopperSsdRows {
  cuda::SsdRowsParams rows;
  bool maps;             // TMA loads x and g. Threads copy chunks with fewer than 64 tokens.
  bool maps_dx;          // TMA stores dx
  CUtensorMap x, g, dx;  // boxes of a chunk of a head, for dx of kRowsOfWarp tokens
};

// Offsets in bytes in a CTA's shared memory, which is aligned to 1,024 bytes.
template <int kStates>
struct HopperRowsShape : cuda::SsdSums<1, 1, 2, 4, false> {
  static constexpr int kStages = 3;
  // Sums of a head: DtGradient reads one buffer while the sums of the next heads are computed.
  static constexpr int kSumStages = 4;
  // dA_cumsum and dt of a head are read as long as its sums are. That may be kSumStages heads after its other tiles are
  // released: the sets warpgroup waits for a head's buffer of sums before it releases the head's tiles.
  static constexpr int kDaCumsumStages = kStages + kSumStages;
  static constexpr int kBBytes = kChunk * cuda::padded_row_bytes(kStates);
  static constexpr int kXBytes = cuda::panel_bytes(kChunk);
  static constexpr int kStateBytes = kRowsDims * cuda::padded_row_bytes(kStates);
  static constexpr int kScoreBytes = cuda::panel_bytes(kChunk);
  // In a stage.
  static constexpr int kG = kXBytes;
  static constexpr int kState = 2 * kXBytes;
  static constexpr int kGradient = kState + kStateBytes;
  static constexpr int kStageBytes = kGradient + kStateBytes;

  static constexpr int kC = kBBytes;  // B is at 0
  static constexpr int kHead = 2 * kBBytes;
  static constexpr int kScores = kHead + kStages * kStageBytes;  // [2]
  static constexpr int kProducts = kScores + 2 * kScoreBytes;    // [2]
  static constexpr int kDx = kProducts + 2 * kScoreBytes;
  static constexpr int kDaCumsum = kDx + kXBytes;  // [kDaCumsumStages]
  static constexpr int kSumsAt = kDaCumsum + kDaCumsumStages * kChunkDaCumsumFloats * 4;
  static constexpr int kBarriers = kSumsAt + kSumStages * HopperRowsShape::kSumFloats * 4;
  // Full and empty: heads, sums, scores, products.
  static constexpr int kBytes = kBarriers + 8 * 2 * (kStages + kSumStages + 2 + 2);
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBytes, 1024);
  static_assert(kBarriers % 8 == 0 && kSharedBytes <= 227 * 1024);
};

// The kernels of one state_dim, bf16.
struct HopperSsdBackwardLauncher {
  void (*load)();  // loads all kernels onto the current device
  void (*accumulate)(const cuda::SsdStatesParams& params, bool reversed, int multiprocessors, cudaStream_t stream);
  bool (*accumulate_gated)(const cuda::SsdStatesParams& params, const cuda::SsmTensor& dy, int multiprocessors,
                           cudaStream_t stream);
  void (*expand)(const cuda::SsdStatesParams& params, bool reversed, int segments, int multiprocessors,
                 cudaStream_t stream);
  void (*rows)(const cuda::SsdRowsParams& params, int segments, cudaStream_t stream);
  void (*gate)(const cuda::SsdGateParams& params, int segments, int multiprocessors, cudaStream_t stream);
};

extern const HopperSsdBackwardLauncher ssd_backward_64;
extern const HopperSsdBackwardLauncher ssd_backward_128;

}  // namespace ringattn::sm90
