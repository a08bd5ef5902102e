// SPDX-License-Identifier: Apache-2.0
// The warps that bring latents of 8 bits: the first of them fetches codes (latent_fetch.cuh), and all make elements of
// them. Each CTA of a cluster expands its rows of a tile and sends them to the other ones.
#pragma once

#include "kernels/sm90/latent/latent_fetch.cuh"

namespace ringattn::sm90 {

inline constexpr int kExpanders = (kLatentThreads - kLatentFoldThreads) / 32;  // warps

template <class C>
class LatentExpander {
 public:
  __device__ __forceinline__ LatentExpander(const LatentCodeParams& p, const LatentMap& map, std::uint32_t rank)
      : map_(map),
        other_(1U - rank),
        first_row_(static_cast<int>(rank) * (kExpanders * Row::kRows) + warp() * Row::kRows),
        row_(p, first_row_),
        fetcher_(p.step, map, rank) {
    static_assert(C::kCtas * kExpanders * Row::kRows == kLatentTile && C::kCtas <= 2);
  }

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const bool fetches = warp() == 0;
    if (fetches) fetcher_.begin(unit);
    float4 next = row_.scales(unit, unit.begin);
#pragma unroll 1
    for (int tile = unit.begin; tile < unit.end; ++tile, ++tiles_) {
      if (fetches && fetcher_.next() == tile) fetcher_.fetch_next(unit);
      // The next one, where it has a place before this one is expanded.
      if (fetches && tile + 1 < unit.end && fetcher_.has_place()) fetcher_.fetch_next(unit);
      const float4 scales = next;
      next = row_.scales(unit, tile + 1);
      expand(scales);
    }
  }

 private:
  using Row = CodeRow<2 * C::kCtas>;

  static __device__ __forceinline__ int warp() { return (thread_of_cta() - kLatentFoldThreads) / 32; }

  __device__ __forceinline__ void expand(const float4& scales) const {
    const std::uint32_t stage = stage_of(tiles_);
    const std::uint32_t tile = map_.tile(stage);
    const auto panel = [tile](int n) { return tile + static_cast<std::uint32_t>(n * LatentMap::kPanelBytes); };
    const int lane = thread_of_cta() % 32;
    constexpr int kRowBytes = Row::kRows * kPanelRowBytes;  // of a panel, those of this warp's rows
    barrier_wait(map_.codes_full(stage), parity_of(tiles_));
    barrier_wait(map_.empty(stage, 0), parity_of(tiles_) ^ 1U);  // the other half has been given back to the codes
#pragma unroll
    for (int block = 0; block < kCodeBlocks; ++block) {
      row_.template expand<typename C::Element>(panel(kCodeSlot + block), panel(2 * block), panel(2 * block + 1),
                                                Row::of_block(scales, block));
      proxy_fence();
      __syncwarp();
      const std::uint32_t full = map_.full(stage, block);
      if constexpr (C::kCtas > 1) {
        if (lane < 2) {
          const std::uint32_t rows = panel(2 * block + lane) + static_cast<std::uint32_t>(first_row_ * kPanelRowBytes);
          send_told_bytes(in_cta(rows, other_), rows, kRowBytes, in_cta(full, other_));
        }
      }
      // As many bytes as this warp sends come from the same one of the other CTA.
      if (lane == 0) barrier_arrive_expect(full, C::kCtas > 1 ? kPartPanels * kRowBytes : 0);
      __syncwarp();
    }
  }

  const LatentMap& map_;
  const std::uint32_t other_;  // rank of the other CTA of a cluster
  const int first_row_;
  const Row row_;
  LatentFetcher<C> fetcher_;
  std::uint32_t tiles_ = 0;  // of all units so far
};

}  // namespace ringattn::sm90
