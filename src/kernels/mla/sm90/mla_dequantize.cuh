// SPDX-License-Identifier: Apache-2.0
// The dequantizing warps of mla_kernel with the FP8 latent cache. The first one is also the producer
// (mla_producer.cuh). In a cluster, each CTA dequantizes its half of a tile's rows and copies them to the other CTA.
#pragma once

#include "kernels/mla/sm90/mla_producer.cuh"

namespace ringattn::sm90 {

inline constexpr int kDequantizers = (kMlaThreads - kMlaConsumerThreads) / 32;  // warps

template <class C>
class MlaDequantizer {
 public:
  __device__ __forceinline__ MlaDequantizer(const MlaFp8Params& p, const MlaMap& map, std::uint32_t rank)
      : map_(map),
        peer_(1U - rank),
        first_row_(static_cast<int>(rank) * (kDequantizers * Row::kRows) + warp() * Row::kRows),
        row_(p, first_row_),
        producer_(p.step, map, rank) {
    static_assert(C::kCtas * kDequantizers * Row::kRows == kMlaKeyTile && C::kCtas <= 2);
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const bool is_producer = warp() == 0;
    if (is_producer) producer_.begin(work_tile);
    float4 next = row_.scales(work_tile, work_tile.begin);
#pragma unroll 1
    for (int tile = work_tile.begin; tile < work_tile.end; ++tile, ++tiles_) {
      if (is_producer && producer_.next() == tile) producer_.load_next(work_tile);
      // Loads the next tile before this one is dequantized, if its stage is empty.
      if (is_producer && tile + 1 < work_tile.end && producer_.has_free_stage()) producer_.load_next(work_tile);
      const float4 scales = next;
      next = row_.scales(work_tile, tile + 1);
      dequantize(scales);
    }
  }

 private:
  using Row = Fp8Row<2 * C::kCtas>;

  static __device__ __forceinline__ int warp() { return (thread_of_cta() - kMlaConsumerThreads) / 32; }

  __device__ __forceinline__ void dequantize(const float4& scales) const {
    const std::uint32_t stage = stage_of(tiles_);
    const std::uint32_t tile = map_.tile(stage);
    const auto panel = [tile](int n) { return tile + static_cast<std::uint32_t>(n * MlaMap::kPanelBytes); };
    const int lane = thread_of_cta() % 32;
    constexpr int kRowBytes = Row::kRows * kPanelRowBytes;  // of one panel of this warp's rows
    barrier_wait(map_.fp8_full(stage), parity_of(tiles_));
    // The producer has waited for the other half, which the fp8 values were loaded into.
    barrier_wait(map_.empty(stage, 0), parity_of(tiles_) ^ 1U);
#pragma unroll
    for (int block = 0; block < kScaleBlocks; ++block) {
      row_.template dequantize<typename C::Element>(panel(kFp8Panel + block), panel(2 * block), panel(2 * block + 1),
                                                    Row::of_block(scales, block));
      proxy_fence();
      __syncwarp();
      const std::uint32_t full = map_.full(stage, block);
      if constexpr (C::kCtas > 1) {
        if (lane < 2) {
          const std::uint32_t rows = panel(2 * block + lane) + static_cast<std::uint32_t>(first_row_ * kPanelRowBytes);
          dsmem_copy_expected(map_to_cta(rows, peer_), rows, kRowBytes, map_to_cta(full, peer_));
        }
      }
      // The same warp of the other CTA sends as many bytes here.
      if (lane == 0) barrier_arrive_expect(full, C::kCtas > 1 ? kPartPanels * kRowBytes : 0);
      __syncwarp();
    }
  }

  const MlaMap& map_;
  const std::uint32_t peer_;  // rank of the other CTA in the cluster
  const int first_row_;
  const Row row_;
  MlaProducer<C> producer_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

}  // namespace ringattn::sm90
