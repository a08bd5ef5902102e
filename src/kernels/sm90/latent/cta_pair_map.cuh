// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA of a pair (cta_pair.cuh). The two CTAs of a cluster, 0 and 1, have the
// left and the right 256 columns of a work_tile's outputs. Tiles are scored in turn: CTA 0 scores those with even
// numbers. The scorer of a tile needs all of it, as keys; the other CTA needs the half that is its own, as values.
//
//   from 0     [2][64 keys]  right halves of the tiles that CTA 0 scores, in both CTAs
//   from 1     [2][64 keys]  left halves of the tiles that CTA 1 scores, in both CTAs
//   own        [2][64 keys]  this CTA's half of the tiles that it scores
//   rope       [2][64 keys]  the rotary keys of these tiles; once they have been scored, their probabilities
//   probabilities    [2][64 rows]  probabilities of the tiles that the other CTA scores
//   softmax_offsets [2][2][64]    r behind a tile, rows n and n + 8 of a warp side by side: of those that this CTA
//   scores, and
//                            of the other ones
//   sums       [64 rows][4]  what the threads of a row have of l, behind the other CTA's last tile
//   ends       [2][64 rows]  l of a work_tile's rows
//   notes      [2]           what there is to know of a work_tile
//   barriers
//
// What is brought for both CTAs lies at the same stage in both. Of two copies, a CTA's tiles, or work_tiles, take
// turns. Halves lie in panels of 64 columns, as in the fold.
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/latent/mla_work_tile_info.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

inline constexpr int kCtaPairPanels = kLatentDimV / kPanelColumns / 2;  // of a half
inline constexpr int kCtaPairColumns = kLatentDimV / 2;
inline constexpr int kCtaPairConsumers = 2;     // warpgroups that fold: one scores, one has the outputs
inline constexpr int kCtaPairQueryBarrier = 3;  // of the threads that score, and the fetching warp
inline constexpr int kCtaPairInfoReaders =
    kCtaPairConsumers * kWarpgroup / 32 + 1;  // their warps, and the one that sends

// Of a tile. Tiles are counted over the life of the CTA; of two tiles that rescale_to each other, one is this CTA's.
__device__ __forceinline__ MlaPipelineState cta_pair_pipeline_state(std::uint32_t tile) {
  return MlaPipelineState::of(tile >> 1);
}

struct CtaPairMap {
  // An address also says whose memory it is: copies and arrivals would reach the first CTA's else.
  std::uint32_t base;
  std::uint32_t rank;

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kHalfBytes = kCtaPairPanels * kPanelBytes;
  static constexpr int kOwnOffset = 4 * kHalfBytes;
  static constexpr int kRopeOffset = 6 * kHalfBytes;
  static constexpr int kProbabilityOffset = kRopeOffset + 2 * kPanelBytes;
  static constexpr int kSoftmaxOffsetsOffset = kProbabilityOffset + 2 * kPanelBytes;
  static constexpr int kSumOffset = kSoftmaxOffsetsOffset + 4 * kQueryTile * 4;
  static constexpr int kEndOffset = kSumOffset + kQueryTile * 16;
  static constexpr int kInfoOffset = kEndOffset + 2 * kQueryTile * 4;
  static constexpr int kBarrierOffset = kInfoOffset + 2 * MlaWorkTileInfo::kBytes;
  static constexpr int kBarriers = 31;
  static constexpr int kBytes = kBarrierOffset + kBarriers * kBarrierBytes;
  static_assert(kBytes <= kMaxSharedBytes && kPanelBytes % 1024 == 0 && kPanelBytes == kQueryTile * kPanelRowBytes);

  // The half of a tile that goes to both CTAs, where `scorer` scores it: columns of the other CTA's.
  __device__ std::uint32_t shared_half(std::uint32_t scorer, std::uint32_t stage) const {
    return at(0, 2 * scorer + stage, kHalfBytes);
  }
  __device__ std::uint32_t own_half(std::uint32_t stage) const { return at(kOwnOffset, stage, kHalfBytes); }
  // Of a tile that this CTA scores: the half with the left or the right columns.
  __device__ std::uint32_t half(std::uint32_t which, std::uint32_t stage) const {
    return which == rank ? own_half(stage) : shared_half(rank, stage);
  }
  // Of any tile: this CTA's columns.
  __device__ std::uint32_t values(bool own, std::uint32_t stage) const {
    return own ? own_half(stage) : shared_half(1U - rank, stage);
  }
  // Of the blocks of 128 columns of a tile of 8 bits that CTA `scorer` scores, the one that is expanded after `nth`
  // others: first those that both CTAs need. The fp8 of all lie in this CTA's own half.
  static constexpr std::uint32_t block_of(std::uint32_t scorer, std::uint32_t nth) {
    return (nth + 2 - 2 * scorer) % 4;
  }
  __device__ std::uint32_t rope(std::uint32_t stage) const { return at(kRopeOffset, stage, kPanelBytes); }
  __device__ std::uint32_t probabilities(bool own, std::uint32_t stage) const {
    return own ? rope(stage) : at(kProbabilityOffset, stage, kPanelBytes);
  }
  // Of a scoring thread's two rows, as the three threads beside it have them too.
  __device__ std::uint32_t softmax_offsets(bool own, std::uint32_t stage, int thread) const {
    const auto pair = static_cast<std::uint32_t>(thread / 4);
    return at(kSoftmaxOffsetsOffset, (own ? 0U : kQueryTile) + stage * (kQueryTile / 2) + pair, 8);
  }
  // Of one of the scoring threads: of its two rows.
  __device__ std::uint32_t sums(int thread) const { return at(kSumOffset, static_cast<std::uint32_t>(thread), 8); }
  __device__ std::uint32_t end(std::uint32_t stage, int row) const {
    return at(kEndOffset, stage * kQueryTile + static_cast<std::uint32_t>(row), 4);
  }
  __device__ MlaWorkTileInfo info(std::uint32_t stage) const {
    return {at(kInfoOffset, stage, MlaWorkTileInfo::kBytes)};
  }

  // A shared half has arrived; so have a half of this CTA's own, and a rotary key.
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
  // At a tile's scorer, when its stage may be filled again: this CTA's outputs have its own half; it has been scored,
  // and the other CTA's outputs have the shared half, and the probabilities that were sent from the rotary keys' stage.
  __device__ std::uint32_t own_empty(std::uint32_t stage) const { return barrier(8 + stage); }
  __device__ std::uint32_t shared_empty(std::uint32_t stage) const { return barrier(23 + stage); }
  // A tile's probabilities are here.
  __device__ std::uint32_t probabilities_full(bool own, std::uint32_t stage) const {
    return barrier((own ? 10U : 12U) + stage);
  }
  // The fp8 of a tile of 8 bits have arrived.
  __device__ std::uint32_t fp8_full(std::uint32_t stage) const { return barrier(27 + stage); }
  // References behind a tile are here; and sums behind one of the other CTA's.
  __device__ std::uint32_t softmax_offsets_full(bool own, std::uint32_t stage) const {
    return barrier((own ? 25U : 14U) + stage);
  }
  __device__ std::uint32_t sums_full() const { return barrier(16); }
  // The ends of a work_tile are here; the outputs of both CTAs have read them.
  __device__ std::uint32_t ends_full(std::uint32_t stage) const { return barrier(17 + stage); }
  __device__ std::uint32_t ends_empty(std::uint32_t stage) const { return barrier(29 + stage); }
  __device__ std::uint32_t info_full(std::uint32_t stage) const { return barrier(19 + stage); }
  __device__ std::uint32_t info_empty(std::uint32_t stage) const { return barrier(21 + stage); }

 private:
  __device__ std::uint32_t barrier(std::uint32_t number) const { return at(kBarrierOffset, number, kBarrierBytes); }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// By one thread. `dequantizers`: warps that make elements of fp8; 0: the tiles are fetched.
__device__ __forceinline__ void init_cta_pair_barriers(const CtaPairMap& map, int dequantizers) {
  constexpr int kWarps = kWarpgroup / 32;
  for (std::uint32_t i = 0; i < 2; ++i) {
    // One arrival each, of the fetching warp of the CTA that scores, which tells how many bytes come; or, in that CTA,
    // one of each warp that expands.
    const int here = dequantizers == 0 ? 1 : dequantizers;
    barrier_init(map.shared_full(map.rank, i), here);
    barrier_init(map.shared_full(1U - map.rank, i), 1);
    barrier_init(map.own_full(i), here);
    barrier_init(map.fp8_full(i), 1);
    barrier_init(map.rope_full(i), 1);
    barrier_init(map.own_empty(i), kWarps);         // those with outputs
    barrier_init(map.shared_empty(i), 2 * kWarps);  // those that score, and those with the other CTA's outputs
    // The scoring warps of this CTA, or the sending one of the other CTA.
    barrier_init(map.probabilities_full(true, i), kWarps);
    barrier_init(map.probabilities_full(false, i), 1);
    barrier_init(map.softmax_offsets_full(true, i), kWarps);
    barrier_init(map.softmax_offsets_full(false, i), 1);
    barrier_init(map.ends_full(i), kWarps);  // of whichever CTA has scored the work_tile's last tile
    barrier_init(map.ends_empty(i), 2 * kWarps);
    barrier_init(map.info_full(i), 1);
    barrier_init(map.info_empty(i), kCtaPairInfoReaders + dequantizers);
  }
  barrier_init(map.sums_full(), kWarps);
  barrier_init_fence();
}

}  // namespace ringattn::sm90
