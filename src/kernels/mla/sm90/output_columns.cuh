// SPDX-License-Identifier: Apache-2.0
// Some output columns of a work tile's 64 rows in the registers of a warpgroup, where several CTAs share the work tile:
// O += P V, tile by tile in order. Columns from kDimV on are undefined and are not stored.
#pragma once

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/finish.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/softmax_offsets.cuh"

namespace ringattn::sm90 {

// Makes a warp-uniform condition known as uniform to the compiler.
__device__ __forceinline__ bool all_of_warp(bool holds) { return __all_sync(0xffffffffU, holds) != 0; }

inline constexpr int kOutputBarrier = 2;  // output warpgroup

template <class C, int kColumns>
class OutputColumns {
 public:
  // Rescale factors of a thread's two rows, and whether any factor of the warp is not 1.
  struct Rescale {
    float factor[2];
    bool any;
  };

  __device__ __forceinline__ void begin_work_tile() { softmax_offset_[0] = softmax_offset_[1] = -INFINITY; }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = 0.0F;
    }
  }

  __device__ __forceinline__ float softmax_offset(int half) const { return softmax_offset_[half]; }
  // Sets the softmax offsets after the next tile. Returns the factors for the outputs of earlier tiles.
  __device__ __forceinline__ Rescale update_offsets(const float (&softmax_offsets)[2]) {
    Rescale rescale;
    bool mine = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale.factor[half] = factor_between(softmax_offset_[half], softmax_offsets[half]);
      mine = mine || offset_moves(softmax_offset_[half], softmax_offsets[half]);
      softmax_offset_[half] = softmax_offsets[half];
    }
    rescale.any = !all_of_warp(!mine);
    return rescale;
  }
  __device__ __forceinline__ void scale(const Rescale& rescale) {
    if (!rescale.any) return;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = __fmul_rn(o_[n][i], rescale.factor[i / 2]);
    }
  }

  // Issues O += P V of a tile. `first`: of the work tile.
  __device__ __forceinline__ void multiply(std::uint32_t probabilities, std::uint32_t values, bool first) {
    const std::uint32_t p = warp_uniform(descriptor_low(probabilities));
    const std::uint32_t v = warp_uniform(descriptor_low(values, kPanelBytes));
    pin(o_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kMlaKeyTile / 16; ++step) {
      Wgmma<typename C::Element, kColumns>::sv(
          o_, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)), step > 0 || !first);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void await() {
    wgmma_wait<0>();
    pin(o_);
  }

  // Rows of a tile after the sequence's last key hold other data, or are left from an earlier tile. Their probabilities
  // are 0, but 0 · ∞ is NaN, so they are cleared. By the whole warpgroup, when no other warp reads these columns.
  __device__ __forceinline__ void clear_tail(std::uint32_t values, int keys) const {
    constexpr int kChunks = kColumns / 8;
#pragma unroll 1
    for (int i = keys * kChunks + thread_of_warpgroup(); i < kMlaKeyTile * kChunks; i += kWarpgroup) {
      const int chunk = i % kChunks;
      cuda::store_shared(
          values + static_cast<std::uint32_t>(chunk / 8 * kPanelBytes) + cuda::swizzled(i / kChunks, chunk % 8),
          uint4{0, 0, 0, 0});
    }
    proxy_fence();
    named_sync(kOutputBarrier, kWarpgroup);
  }

  // `sum`: l of this thread's rows. `has_tiles`: the work tile is not empty.
  __device__ __forceinline__ void store_rows(const DecodeParams& params, const DecodeWorkTile& work_tile,
                                             int first_column, const float (&sum)[2], bool has_tiles) const {
    const int lane = thread_of_cta() % 4;
    const bool is_leader = first_column == 0 && lane == 0;
    const int rows = rows_of(params, work_tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = tile_row_of_thread() + 8 * half;
      const bool present = tile_row < rows;
      const DecodeCoord coord = coord_of(params, work_tile, present ? tile_row : rows - 1);
      if (!finishes(params, work_tile)) {
        // A row without a partial here is finished by another work tile, or by the merge launch.
        if (!has_tiles || !present) continue;
        auto* const outputs = reinterpret_cast<float4*>(partial_of(params, work_tile, coord) + first_column);
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
          if (first_column + 16 * n >= C::kDimV) break;
          __stcg(outputs + 4 * n + lane, float4{o_[2 * n][2 * half], o_[2 * n][2 * half + 1], o_[2 * n + 1][2 * half],
                                                o_[2 * n + 1][2 * half + 1]});
        }
        if (is_leader) store_stats(params, work_tile, 0, 1, tile_row, coord, float2{softmax_offset_[half], sum[half]});
        continue;
      }
      const FinishedRow<C> finished(params, coord, softmax_offset_[half], sum[half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 4) {
        if (first_column + 8 * n >= C::kDimV) break;
        const auto two = [&](int i) { return finished.pack(o_[n + i][2 * half], o_[n + i][2 * half + 1]); };
        const uint4 eight = transpose_in_quad(uint4{two(0), two(1), two(2), two(3)}, lane);
        if (present) finished.write(first_column + 8 * (n + lane), eight);
      }
      if (is_leader && present) finished.write_lse();
    }
  }

 private:
  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);

  float softmax_offset_[2];  // of this thread's rows
  float o_[kColumns / 8][4];
};

}  // namespace ringattn::sm90
