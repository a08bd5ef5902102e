// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_ssd, what they are given, and where everything lies in a CTA's shared memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/device/panels.hpp"
#include "kernels/cuda/scan/ssm_params.hpp"
#include "kernels/sm90/scan/dim_blocks.hpp"

namespace ringattn::sm90 {

using cuda::kChunk;
using cuda::kChunkDaCumsumFloats;
using cuda::kChunksOfSegment;
using cuda::SsmParams;
using cuda::SsmTensor;

inline constexpr int kSsdThreads = 128 * (kDimBlocksPerCta + 1);
// 128 of each thread, dealt anew. Products under way hold the state, rows of y and operands: with fewer registers ptxas
// waits for each of them before it issues the next.
inline constexpr int kSsdFetchRegisters = 32;
inline constexpr int kSsdDimBlockRegisters = 160;
// Of the rows' kernel, where the warpgroup that fetches computes scores, too.
inline constexpr int kSsdScoreRegisters = 56;
inline constexpr int kSsdRowRegisters = 152;

inline constexpr int kDimBlockTileBytes =
    cuda::panel_bytes(kChunk);  // x or y of a chunk and dim_block, or 64 × 64 intra_chunk_scores
inline constexpr int kDaCumsumBytes = kChunkDaCumsumFloats * 4;
// Decays up to a chunk's tokens, fp32, as lanes read them (up_to_word).
inline constexpr int kUpToLaneFloats = kChunk / 4 + 4;  // of each lane of four: other banks than its neighbours'
inline constexpr int kUpToBytes = 4 * kUpToLaneFloats * 4;
// C · Bᵀ of a chunk on and below the diagonal's blocks: units of 16 x 8, fp32 (ssd_scores.cuh).
inline constexpr int kScoreTiles = 20;
inline constexpr int kScoreTileBytes = 16 * 8 * 4;

struct HopperSsd {
  SsmParams scan;
  DimBlockPartition blocks;  // CTAs of one segment follow each other, and find B and C in the cache
  // Which tensors the copy engine reads or writes; threads copy the others, and chunks that end early.
  bool maps_x, maps_b, maps_c, maps_y;
  CUtensorMap x, b, c, y;  // boxes of a chunk, and a dim_block of a head or all states
};

// Bytes from the beginning of a CTA's shared memory, which is a multiple of 1,024.
template <int kStates, bool kOutputs>
struct SsdLayout {
  static constexpr int kStages = kOutputs ? 3 : 4;  // of B and C
  static constexpr int kInputs = kOutputs ? 2 : 4;  // of x, and of da_cumsum, of a dim_block
  static constexpr int kTileBytes = kChunk * cuda::padded_row_bytes(kStates);
  // What a chunk's tokens are weighed with for the state behind it, in bf16: for local states in two parts, and behind
  // them the chunk's decay; for rows rounded.
  static constexpr int kBehindBytes = kOutputs ? kChunk * 2 : kChunk * 4 + 16;

  static constexpr int kB = 0;                                           // [stages]
  static constexpr int kC = kB + kStages * kTileBytes;                   // [stages]
  static constexpr int kX = kC + (kOutputs ? kStages * kTileBytes : 0);  // [dim_blocks][inputs]
  static constexpr int kIntraChunkScores = kX + kDimBlocksPerCta * kInputs * kDimBlockTileBytes;  // [dim_blocks]
  static constexpr int kSteps =
      kIntraChunkScores + (kOutputs ? kDimBlocksPerCta * kDimBlockTileBytes : 0);       // [dim_blocks][inputs]
  static constexpr int kBehind = kSteps + kDimBlocksPerCta * kInputs * kDaCumsumBytes;  // [dim_blocks][inputs]
  static constexpr int kUpTo = kBehind + kDimBlocksPerCta * kInputs * kBehindBytes;     // [dim_blocks][inputs]
  static constexpr int kScores = kUpTo + (kOutputs ? kDimBlocksPerCta * kInputs * kUpToBytes : 0);  // [2]
  static constexpr int kScoreBytes = kOutputs ? kScoreTiles * kScoreTileBytes : 0;
  static constexpr int kBarriers = kScores + 2 * kScoreBytes;
  // Of B and C: full, empty; of scores: full, empty; of x: full, empty; of what follows from da_cumsum: full.
  static constexpr int kBytes = kBarriers + 8 * (2 * kStages + 4 + 3 * kDimBlocksPerCta * kInputs);
  static constexpr int kSharedBytes = kBytes + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The kernels of states of one size, bf16.
struct HopperSsdLauncher {
  void (*load)();  // both, onto the current device
  void (*accumulate_states)(const SsmParams& params, int multiprocessors, cudaStream_t stream);
  void (*finish)(const SsmParams& params, int multiprocessors, cudaStream_t stream);
};

extern const HopperSsdLauncher ssd_64;
extern const HopperSsdLauncher ssd_128;

}  // namespace ringattn::sm90
