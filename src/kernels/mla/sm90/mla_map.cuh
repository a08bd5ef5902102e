// SPDX-License-Identifier: Apache-2.0
// Shared-memory layout and barriers of a CTA of mla_kernel (mla.cuh).
//
//   Q                [64 rows][576]        written and read by both consumer warpgroups
//   tiles            [2][64 keys][576]     written by TMA: keys, and values as their first 512 columns
//   probabilities    [64 rows][64 keys]    of an even tile, from the warpgroup that computed them to the other one.
//                                          Those of an odd tile overwrite its rotary keys.
//   sums             [64 rows][4]          l of the current KV split, one addend per thread of the row's quad
//   softmax offsets  [64 rows]             of the current KV split; −∞ until a key was visible
//   factors          [64 rows]             by which the outputs are rescaled before this tile is added
//   moved            [4 warps]             whether a factor of the warp's rows is not 1
//   barriers
//   work_tiles       [sequences + 1]       number of work tiles before each sequence (decode/work_tiles.cuh)
//
// Q and tiles are stored in swizzled panels of 64 columns, as in the attention kernel (sm90_attention).
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/mla/sm90/config.hpp"

namespace ringattn::sm90 {

struct MlaMap {
  // Shared-memory address. In a cluster it is a shared::cluster address of this CTA: TMA writes and arrivals on a plain
  // address would go to rank 0.
  std::uint32_t base;

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kTileBytes = kMlaKeyTile * cuda::padded_row_bytes(kLatentDim);
  static constexpr int kTileOffset = kQueryTile * cuda::padded_row_bytes(kLatentDim);
  static constexpr int kProbabilityOffset = kTileOffset + kMlaStages * kTileBytes;
  static constexpr int kSumOffset = kProbabilityOffset + kQueryTile * kPanelRowBytes;
  static constexpr int kSoftmaxOffsetsOffset = kSumOffset + kQueryTile * 16;
  static constexpr int kFactorOffset = kSoftmaxOffsetsOffset + kQueryTile * 4;
  static constexpr int kMovedOffset = kFactorOffset + kQueryTile * 4;
  static constexpr int kBarrierOffset = kMovedOffset + 16;
  static constexpr int kBarriers = kMlaStages * (kMlaTileParts + 4);
  static constexpr int kWorkTileOffset = kBarrierOffset + kBarriers * kBarrierBytes;
  static constexpr int kAllSplitsOffset = kWorkTileOffset + (kMaxMlaSequences + 1) * 4;
  static constexpr int kBytes = kAllSplitsOffset + 4;
  static_assert(kBytes <= kMaxSharedBytes && kTileOffset % 1024 == 0 && kPanelBytes % 1024 == 0);

  __device__ std::uint32_t q() const { return at(0, 0, 0); }
  __device__ std::uint32_t tile(std::uint32_t stage) const { return at(kTileOffset, stage, kTileBytes); }
  __device__ std::uint32_t rope(std::uint32_t stage) const {
    return tile(stage) + static_cast<std::uint32_t>(kLatentDimV / kPanelColumns * kPanelBytes);
  }
  __device__ std::uint32_t probabilities(std::uint32_t number) const {
    return (number & 1U) == 0 ? at(kProbabilityOffset, 0, 0) : rope(1);
  }
  __device__ std::uint32_t sum(int row, int share) const {
    return at(kSumOffset, static_cast<std::uint32_t>(row * 4 + share), 4);
  }
  __device__ std::uint32_t softmax_offset(int row) const {
    return at(kSoftmaxOffsetsOffset, static_cast<std::uint32_t>(row), 4);
  }
  __device__ std::uint32_t factor(int row) const { return at(kFactorOffset, static_cast<std::uint32_t>(row), 4); }
  __device__ std::uint32_t moved(int warp) const { return at(kMovedOffset, static_cast<std::uint32_t>(warp), 4); }
  __device__ std::uint32_t work_tiles_before(int sequence) const {
    return at(kWorkTileOffset, static_cast<std::uint32_t>(sequence), 4);
  }
  // int32, 1 if this CTA processes all KV splits of its rows (mla_schedule.cuh).
  __device__ std::uint32_t all_splits() const { return at(kAllSplitsOffset, 0, 0); }
  // Per stage: `full` per column part (TMA landed), `empty` per half of the latent columns. The warpgroups that own a
  // half, in all CTAs of the cluster, arrive on its `empty`. The rotary keys' columns are free when both halves are.
  __device__ std::uint32_t full(std::uint32_t stage, int part) const {
    return barrier(stage * kMlaTileParts + static_cast<std::uint32_t>(part));
  }
  __device__ std::uint32_t empty(std::uint32_t stage, std::uint32_t half) const {
    return barrier(kMlaStages * kMlaTileParts + 2 * stage + half);
  }
  // FP8 latent cache: the fp8 values of the rows that this CTA dequantizes have landed.
  __device__ std::uint32_t fp8_full(std::uint32_t stage) const {
    return barrier(kMlaStages * (kMlaTileParts + 2) + stage);
  }
  // Per stage: the probabilities, offsets, factors and sums of a tile are written. Each warpgroup arrives on a barrier
  // of its own tiles. With one barrier for both, a warp that waits for the other warpgroup's tile could be released
  // before another warp of its own warpgroup has arrived for the previous tile.
  __device__ std::uint32_t probabilities_full(std::uint32_t stage) const {
    return barrier(kMlaStages * (kMlaTileParts + 3) + stage);
  }

 private:
  __device__ std::uint32_t barrier(std::uint32_t number) const { return at(kBarrierOffset, number, kBarrierBytes); }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// A tile's running number in the CTA gives its stage and the parity of its barriers.
__device__ __forceinline__ std::uint32_t stage_of(std::uint32_t number) { return number & 1U; }
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t number) { return number >> 1 & 1U; }
static_assert(kMlaStages == 2);

// Panels of a column part. The last part is the rotary keys.
inline constexpr int kPartPanels = 2;
inline constexpr int kHalfParts = 2;  // per half of the latent columns
inline constexpr int kRopePart = 2 * kHalfParts;
static_assert(kMlaTileParts == kRopePart + 1 && kRopePart * kPartPanels * kPanelColumns == kLatentDimV);
__device__ __forceinline__ int panels_of_part(int part) { return part < kRopePart ? kPartPanels : 1; }

// By one thread. `ctas`: per cluster. `dequantizers`: warps that dequantize fp8 values; 0 if TMA loads the elements.
__device__ __forceinline__ void init_mla_barriers(const MlaMap& map, int ctas, int dequantizers) {
  for (std::uint32_t stage = 0; stage < kMlaStages; ++stage) {
    for (int part = 0; part < kMlaTileParts; ++part) {
      barrier_init(map.full(stage, part), part == kRopePart || dequantizers == 0 ? 1 : dequantizers);
    }
    for (std::uint32_t half = 0; half < 2; ++half) barrier_init(map.empty(stage, half), ctas * kWarpgroup / 32);
    barrier_init(map.fp8_full(stage), 1);
    barrier_init(map.probabilities_full(stage), kWarpgroup / 32);
  }
  barrier_init_fence();
}

}  // namespace ringattn::sm90
