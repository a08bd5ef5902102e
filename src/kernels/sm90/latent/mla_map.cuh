// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA that decodes over latents (mla.cuh).
//
//   Q           [64 rows]           both attending warpgroups write it, and read it
//   tiles       [2 stages][64 keys] the fetching warp has the copy engine write them; keys, and values as their first
//                                   columns
//   probabilities     [64 rows][64 keys]  the probabilities of a tile with an even number, from the warpgroup that has
//   scored it
//                                   to the other one; those of an odd one lie where its rotary keys were
//   sums        [64 rows][4]        what the threads of a row have of l
//   softmax_offsets  [64 rows]           r of the open group; −∞ as long as it has seen nothing
//   factors     [64 rows], moved [4 warps]  by how much r has moved with this tile, and whether it has
//   barriers
//   work_tiles       [sequences + 1]     how many work_tiles come before each sequence (decode/work_tiles.cuh)
//
// Tiles lie in panels of 64 columns, as in the fold.
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

struct MlaMap {
  // In a cluster an address also says whose memory it is: copies and arrivals would reach the first CTA's else.
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
  // Whether the CTA has all groups of its rows (mla_schedule.cuh).
  __device__ std::uint32_t whole() const { return at(kAllSplitsOffset, 0, 0); }
  // Of a stage: a part of its columns has arrived; the warpgroups of the cluster with one half's columns are done with
  // that half, and then nobody needs it. The rotary keys' place is free when both are.
  __device__ std::uint32_t full(std::uint32_t stage, int part) const {
    return barrier(stage * kMlaTileParts + static_cast<std::uint32_t>(part));
  }
  __device__ std::uint32_t empty(std::uint32_t stage, std::uint32_t half) const {
    return barrier(kMlaStages * kMlaTileParts + 2 * stage + half);
  }
  // The fp8 of a tile of 8 bits have arrived, those of the rows that this CTA expands.
  __device__ std::uint32_t fp8_full(std::uint32_t stage) const {
    return barrier(kMlaStages * (kMlaTileParts + 2) + stage);
  }
  // The probabilities of a tile in this stage, and what else its rows have, are there. Each warpgroup tells of its own
  // tiles by a barrier of its own: by a common one, a warp that waits for the other warpgroup's would go on while
  // another warp of its own has not told of the tile before.
  __device__ std::uint32_t probabilities_full(std::uint32_t stage) const {
    return barrier(kMlaStages * (kMlaTileParts + 3) + stage);
  }

 private:
  __device__ std::uint32_t barrier(std::uint32_t number) const { return at(kBarrierOffset, number, kBarrierBytes); }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// A tile's number in the CTA's life says where it lies, and in which phase of the barriers.
__device__ __forceinline__ std::uint32_t stage_of(std::uint32_t number) { return number & 1U; }
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t number) { return number >> 1 & 1U; }
static_assert(kMlaStages == 2);

// The panels of a part of a tile. The last part is the rotary keys.
inline constexpr int kPartPanels = 2;
inline constexpr int kHalfParts = 2;  // of a half's columns
inline constexpr int kRopePart = 2 * kHalfParts;
static_assert(kMlaTileParts == kRopePart + 1 && kRopePart * kPartPanels * kPanelColumns == kLatentDimV);
__device__ __forceinline__ int panels_of_part(int part) { return part < kRopePart ? kPartPanels : 1; }

// By one thread. `ctas`: of the cluster. `dequantizers`: warps that make elements of fp8; 0: the tiles are fetched.
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
