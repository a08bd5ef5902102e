// SPDX-License-Identifier: Apache-2.0
// Kernel parameters and shared-memory layout of sm90_ssd. kernels/instances.cmake lists the instantiations, and
// sm90_ssd.cpp launches them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/sm90/dim_blocks.hpp"

namespace ringattn::sm90 {

using cuda::kChunk;
using cuda::kChunkDaCumsumFloats;
using cuda::kChunksOfSegment;
using cuda::SsmParams;
using cuda::SsmTensor;

inline constexpr int kSsdThreads = 128 * (kDimBlocksPerCta + 1);
// Registers per thread after setmaxnreg, from 128 each at launch. MMAs in flight hold the state, y and operands: with
// fewer registers ptxas waits for each MMA before it issues the next.
inline constexpr int kSsdProducerRegisters = 32;
inline constexpr int kSsdDimBlockRegisters = 160;
// For ssd_finish_kernel, whose producer warpgroup also computes scores.
inline constexpr int kSsdScoreRegisters = 56;
inline constexpr int kSsdOutputRegisters = 152;

inline constexpr int kDimBlockTileBytes =
    cuda::panel_bytes(kChunk);  // x or y of a chunk and dim_block, or 64 × 64 intra_chunk_scores
inline constexpr int kDaCumsumBytes = kChunkDaCumsumFloats * 4;
// exp2(dA_cumsum) of a chunk's tokens in fp32, in the order in which lanes read them (prefix_decay_word).
inline constexpr int kPrefixDecayLaneFloats = kChunk / 4 + 4;  // per lane of a quad; padded to avoid bank conflicts
inline constexpr int kPrefixDecayBytes = 4 * kPrefixDecayLaneFloats * 4;
// C · Bᵀ of a chunk, in tiles of 16 x 8 fp32. Only 16 x 16 blocks on and below the diagonal (ssd_scores.cuh).
inline constexpr int kScoreTiles = 20;
inline constexpr int kScoreTileBytes = 16 * 8 * 4;

struct HopperSsd {
  SsmParams scan;
  DimBlockPartition blocks;  // CTAs of one segment have consecutive indices, so B and C hit in L2
  // True if TMA loads or stores the tensor. Threads copy the others, and chunks with fewer than 64 tokens.
  bool maps_x, maps_b, maps_c, maps_y;
  CUtensorMap x, b, c, y;  // boxes of a chunk × 64 dims of a head, or × state_dim
};

// Offsets in bytes in a CTA's shared memory, which is aligned to 1,024 bytes.
template <int kStates, bool kOutputs>
struct SsdLayout {
  static constexpr int kStages = kOutputs ? 3 : 4;       // pipeline stages of B and C
  static constexpr int kInputStages = kOutputs ? 2 : 4;  // pipeline stages of x and dA_cumsum, per dim block
  static constexpr int kTileBytes = kChunk * cuda::padded_row_bytes(kStates);
  // Scales of the chunk's tokens in the state after the chunk. For local states a bf16 hi/lo pair each, then the
  // chunk's decay in fp32. For y rounded to bf16.
  static constexpr int kStateScaleBytes = kOutputs ? kChunk * 2 : kChunk * 4 + 16;

  static constexpr int kB = 0;                                           // [stages]
  static constexpr int kC = kB + kStages * kTileBytes;                   // [stages]
  static constexpr int kX = kC + (kOutputs ? kStages * kTileBytes : 0);  // [dim_blocks][input stages]
  static constexpr int kIntraChunkScores = kX + kDimBlocksPerCta * kInputStages * kDimBlockTileBytes;  // [dim_blocks]
  static constexpr int kDaCumsum =
      kIntraChunkScores + (kOutputs ? kDimBlocksPerCta * kDimBlockTileBytes : 0);  // [dim_blocks][input stages]
  static constexpr int kStateScale =
      kDaCumsum + kDimBlocksPerCta * kInputStages * kDaCumsumBytes;  // [dim_blocks][input stages]
  static constexpr int kPrefixDecay =
      kStateScale + kDimBlocksPerCta * kInputStages * kStateScaleBytes;  // [dim_blocks][input stages]
  static constexpr int kScores =
      kPrefixDecay + (kOutputs ? kDimBlocksPerCta * kInputStages * kPrefixDecayBytes : 0);  // [2]
  static constexpr int kScoreBytes = kOutputs ? kScoreTiles * kScoreTileBytes : 0;
  static constexpr int kBarriers = kScores + 2 * kScoreBytes;
  // Barriers: B and C full and empty, scores full and empty, x full and empty, state scales full.
  static constexpr int kBytes = kBarriers + 8 * (2 * kStages + 4 + 3 * kDimBlocksPerCta * kInputStages);
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBytes, 1024);
  static_assert(kSharedBytes <= 227 * 1024);
};

// The kernels of one state_dim, bf16.
struct HopperSsdLauncher {
  void (*load)();  // loads both kernels onto the current device
  void (*accumulate_states)(const SsmParams& params, int multiprocessors, cudaStream_t stream);
  void (*finish)(const SsmParams& params, int multiprocessors, cudaStream_t stream);
};

extern const HopperSsdLauncher ssd_64;
extern const HopperSsdLauncher ssd_128;

}  // namespace ringattn::sm90
