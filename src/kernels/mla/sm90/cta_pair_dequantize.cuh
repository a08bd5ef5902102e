// SPDX-License-Identifier: Apache-2.0
// The dequantizing warps of a CTA in a pair. They dequantize the tiles that this CTA scores (fp8_rows.cuh), and send
// the half that the peer CTA needs.
#pragma once

#include "kernels/mla/sm90/cta_pair_map.cuh"
#include "kernels/mla/sm90/fp8_rows.cuh"

namespace ringattn::sm90 {

inline constexpr int kCtaPairDequantizers = 2;  // warps

template <class C>
class CtaPairDequantizer {
 public:
  __device__ __forceinline__ CtaPairDequantizer(const MlaFp8Params& p, const CtaPairMap& map)
      : map_(map), first_row_(thread_of_cta() / 32 % kCtaPairDequantizers * Row::kRows), row_(p, first_row_) {
    static_assert(kCtaPairDequantizers * Row::kRows == kMlaKeyTile);
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    const auto scales_of = [&](std::uint32_t number) {
      return row_.scales(work_tile, work_tile.begin + static_cast<int>(number - first));
    };
    float4 next = scales_of(tile);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const float4 scales = next;
      next = scales_of(tile + 2);
      dequantize(scales, cta_pair_pipeline_state(tile));
    }
  }

 private:
  using Row = Fp8Row<1>;

  __device__ __forceinline__ void dequantize(const float4& scales, const MlaPipelineState& state) const {
    const std::uint32_t shared = map_.shared_half(map_.rank, state.index), own = map_.own_half(state.index);
    // Panels of a tile, starting with those that both CTAs need.
    const auto panel = [=](int n) {
      return (n < kCtaPairPanels ? shared : own) +
             static_cast<std::uint32_t>(n % kCtaPairPanels * CtaPairMap::kPanelBytes);
    };
    const int lane = thread_of_cta() % 32;
    constexpr int kRowBytes = Row::kRows * kPanelRowBytes;  // of one panel of this warp's rows
    barrier_wait(map_.fp8_full(state.index), state.parity);
    barrier_wait(map_.shared_empty(state.index), state.parity ^ 1U);
#pragma unroll
    for (int nth = 0; nth < kScaleBlocks; ++nth) {
      const int block = static_cast<int>(CtaPairMap::block_of(map_.rank, static_cast<std::uint32_t>(nth)));
      row_.template dequantize<typename C::Element>(panel(kFp8Panel + nth), panel(2 * nth), panel(2 * nth + 1),
                                                    Row::of_block(scales, block));
      proxy_fence();
      __syncwarp();
      if (2 * nth < kCtaPairPanels && lane < 2) {
        const std::uint32_t rows = panel(2 * nth + lane) + static_cast<std::uint32_t>(first_row_ * kPanelRowBytes);
        const std::uint32_t peer = 1U - map_.rank;
        dsmem_copy_expected(map_to_cta(rows, peer), rows, kRowBytes,
                            map_to_cta(map_.shared_full(map_.rank, state.index), peer));
      }
      if (nth % 2 == 1 && lane == 0) {
        barrier_arrive(nth == 1 ? map_.shared_full(map_.rank, state.index) : map_.own_full(state.index));
      }
      __syncwarp();
    }
  }

  const CtaPairMap& map_;
  const int first_row_;
  const Row row_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

}  // namespace ringattn::sm90
