// SPDX-License-Identifier: Apache-2.0
// Shared-memory layout and barriers of a CTA of cta_pair_kernel (cta_pair.cuh). CTA 0 has the left and CTA 1 the right
// 256 output columns of a work tile. CTA 0 scores the tiles with even numbers, CTA 1 those with odd numbers. The scorer
// of a tile needs all of its columns as keys. The other CTA needs only its own half, as values.
//
//   shared by 0    [2][64 keys][256]     right halves of the tiles that CTA 0 scores, in both CTAs
//   shared by 1    [2][64 keys][256]     left halves of the tiles that CTA 1 scores, in both CTAs
//   own            [2][64 keys][256]     this CTA's half of the tiles that it scores
//   rope           [2][64 keys][64]      rotary keys of these tiles; after scoring, their probabilities
//   probabilities  [2][64 rows][64 keys] of the tiles that the other CTA scores
//   offsets        [2][2][64 rows]       softmax offsets after a tile, of this CTA's and of the other CTA's tiles; rows
//                                        n and n + 8 of a warp adjacent
//   sums           [64 rows][4]          row sums after the other CTA's last tile, one addend per thread of the quad
//   final sums     [2][64 rows]          row sums of a work tile
//   info           [2]                   MlaWorkTileInfo
//   barriers
//
// Shared halves are in the same stage in both CTAs. Arrays with a leading [2] are double-buffered, by tile or by work
// tile. Tiles are stored in swizzled panels of 64 columns, as in the attention kernel (sm90_attention).
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla_work_tile_info.cuh"

namespace ringattn::sm90 {

inline constexpr int kCtaPairPanels = kLatentDimV / kPanelColumns / 2;  // per half
inline constexpr int kCtaPairColumns = kLatentDimV / 2;
inline constexpr int kCtaPairConsumers = 2;     // consumer warpgroups: one computes scores, one outputs
inline constexpr int kCtaPairQueryBarrier = 3;  // scoring warpgroup and producer warp
inline constexpr int kCtaPairInfoReaders =
    kCtaPairConsumers * kWarpgroup / 32 + 1;  // the consumer warps and the sender

// Stage of a tile. Tiles are counted over all work tiles, and this CTA scores every second one.
__device__ __forceinline__ MlaPipelineState cta_pair_pipeline_state(std::uint32_t tile) {
  return MlaPipelineState::of(tile >> 1);
}

struct CtaPairMap {
  // Shared-memory address of this CTA in the shared::cluster window. TMA writes and arrivals on a plain address would
  // go to rank 0.
  std::uint32_t base;
  std::uint32_t rank;

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kHalfBytes = kCtaPairPanels * kPanelBytes;
  static constexpr int kOwnOffset = 4 * kHalfBytes;
  static constexpr int kRopeOffset = 6 * kHalfBytes;
  static constexpr int kProbabilityOffset = kRopeOffset + 2 * kPanelBytes;
  static constexpr int kSoftmaxOffsetsOffset = kProbabilityOffset + 2 * kPanelBytes;
  static constexpr int kSumOffset = kSoftmaxOffsetsOffset + 4 * kQueryTile * 4;
  static constexpr int kFinalSumOffset = kSumOffset + kQueryTile * 16;
  static constexpr int kInfoOffset = kFinalSumOffset + 2 * kQueryTile * 4;
  static constexpr int kBarrierOffset = kInfoOffset + 2 * MlaWorkTileInfo::kBytes;
  static constexpr int kBarriers = 31;
  static constexpr int kBytes = kBarrierOffset + kBarriers * kBarrierBytes;
  static_assert(kBytes <= kMaxSharedBytes && kPanelBytes % 1024 == 0 && kPanelBytes == kQueryTile * kPanelRowBytes);

  // The half of a tile of `scorer` that is loaded to both CTAs: the output columns of the other CTA.
  __device__ std::uint32_t shared_half(std::uint32_t scorer, std::uint32_t stage) const {
    return at(0, 2 * scorer + stage, kHalfBytes);
  }
  __device__ std::uint32_t own_half(std::uint32_t stage) const { return at(kOwnOffset, stage, kHalfBytes); }
  // The left (0) or right (1) half of a tile that this CTA scores.
  __device__ std::uint32_t half(std::uint32_t which, std::uint32_t stage) const {
    return which == rank ? own_half(stage) : shared_half(rank, stage);
  }
  // This CTA's output columns of a tile. `own`: this CTA scores it.
  __device__ std::uint32_t values(bool own, std::uint32_t stage) const {
    return own ? own_half(stage) : shared_half(1U - rank, stage);
  }
  // FP8 latent cache: index of the `nth` block of 128 columns that CTA `scorer` dequantizes. Blocks that both CTAs need
  // come first. The fp8 values of all four are loaded into this CTA's own half.
  static constexpr std::uint32_t block_of(std::uint32_t scorer, std::uint32_t nth) {
    return (nth + 2 - 2 * scorer) % 4;
  }
  __device__ std::uint32_t rope(std::uint32_t stage) const { return at(kRopeOffset, stage, kPanelBytes); }
  __device__ std::uint32_t probabilities(bool own, std::uint32_t stage) const {
    return own ? rope(stage) : at(kProbabilityOffset, stage, kPanelBytes);
  }
  // Offsets of a scoring thread's two rows. The four threads of a quad have the same rows.
  __device__ std::uint32_t softmax_offsets(bool own, std::uint32_t stage, int thread) const {
    const auto pair = static_cast<std::uint32_t>(thread / 4);
    return at(kSoftmaxOffsetsOffset, (own ? 0U : kQueryTile) + stage * (kQueryTile / 2) + pair, 8);
  }
  // A scoring thread's addends of the sums of its two rows.
  __device__ std::uint32_t sums(int thread) const { return at(kSumOffset, static_cast<std::uint32_t>(thread), 8); }
  __device__ std::uint32_t final_sum(std::uint32_t stage, int row) const {
    return at(kFinalSumOffset, stage * kQueryTile + static_cast<std::uint32_t>(row), 4);
  }
  __device__ MlaWorkTileInfo info(std::uint32_t stage) const {
    return {at(kInfoOffset, stage, MlaWorkTileInfo::kBytes)};
  }

  // Full barriers of a shared half, of this CTA's own half, and of the rotary keys.
  __device__ std::uint32_t shared_full(std::uint32_t scorer, std::uint32_t stage) const {
    return barrier(2 * scorer + stage);
  }
  __device__ std::uint32_t own_full(std::uint32_t stage) const { return barrier(4 + stage); }
  __device__ std::uint32_t rope_full(std::uint32_t stage) const { return barrier(6 + stage); }
  __device__ std::uint32_t half_full(std::uint32_t which, std::uint32_t stage) const {
    return which == rank ? own_full(stage) : shared_full(rank, stage);
  }
  __device__ std::uint32_t values_full(bool own, std::uint32_t stage) const {
    return own ? own_full(stage) : shared_full(1U - rank, stage);
  }
  // Empty barriers, at the tile's scorer. own_empty: this CTA's outputs have read its own half. shared_empty: the tile
  // has been scored, and the other CTA's outputs have read the shared half and the probabilities, which were sent from
  // the stage of the rotary keys.
  __device__ std::uint32_t own_empty(std::uint32_t stage) const { return barrier(8 + stage); }
  __device__ std::uint32_t shared_empty(std::uint32_t stage) const { return barrier(23 + stage); }
  // Probabilities of a tile have arrived.
  __device__ std::uint32_t probabilities_full(bool own, std::uint32_t stage) const {
    return barrier((own ? 10U : 12U) + stage);
  }
  // FP8 latent cache: the fp8 values of a tile have landed.
  __device__ std::uint32_t fp8_full(std::uint32_t stage) const { return barrier(27 + stage); }
  // softmax_offsets_full: offsets after a tile have arrived. sums_full: row sums after a tile of the other CTA have
  // arrived.
  __device__ std::uint32_t softmax_offsets_full(bool own, std::uint32_t stage) const {
    return barrier((own ? 25U : 14U) + stage);
  }
  __device__ std::uint32_t sums_full() const { return barrier(16); }
  // final_sums_full: row sums of a work tile have arrived. final_sums_empty: the output warpgroups of both CTAs have
  // read them.
  __device__ std::uint32_t final_sums_full(std::uint32_t stage) const { return barrier(17 + stage); }
  __device__ std::uint32_t final_sums_empty(std::uint32_t stage) const { return barrier(29 + stage); }
  __device__ std::uint32_t info_full(std::uint32_t stage) const { return barrier(19 + stage); }
  __device__ std::uint32_t info_empty(std::uint32_t stage) const { return barrier(21 + stage); }

 private:
  __device__ std::uint32_t barrier(std::uint32_t number) const { return at(kBarrierOffset, number, kBarrierBytes); }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// By one thread. `dequantizers`: warps that dequantize fp8 values; 0 if TMA loads the elements.
__device__ __forceinline__ void init_cta_pair_barriers(const CtaPairMap& map, int dequantizers) {
  constexpr int kWarps = kWarpgroup / 32;
  for (std::uint32_t i = 0; i < 2; ++i) {
    // The producer of the scoring CTA arrives with the byte count. With the FP8 latent cache, each dequantizing warp
    // arrives in the scoring CTA instead.
    const int here = dequantizers == 0 ? 1 : dequantizers;
    barrier_init(map.shared_full(map.rank, i), here);
    barrier_init(map.shared_full(1U - map.rank, i), 1);
    barrier_init(map.own_full(i), here);
    barrier_init(map.fp8_full(i), 1);
    barrier_init(map.rope_full(i), 1);
    barrier_init(map.own_empty(i), kWarps);         // output warps
    barrier_init(map.shared_empty(i), 2 * kWarps);  // scoring warps, and the other CTA's output warps
    // The scoring warps of this CTA arrive, or the sender of the other CTA.
    barrier_init(map.probabilities_full(true, i), kWarps);
    barrier_init(map.probabilities_full(false, i), 1);
    barrier_init(map.softmax_offsets_full(true, i), kWarps);
    barrier_init(map.softmax_offsets_full(false, i), 1);
    barrier_init(map.final_sums_full(i), kWarps);  // of the CTA that has scored the work tile's last tile
    barrier_init(map.final_sums_empty(i), 2 * kWarps);
    barrier_init(map.info_full(i), 1);
    barrier_init(map.info_empty(i), kCtaPairInfoReaders + dequantizers);
  }
  barrier_init(map.sums_full(), kWarps);
  barrier_init_fence();
}

}  // namespace ringattn::sm90
