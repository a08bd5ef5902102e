// SPDX-License-Identifier: Apache-2.0
// The 64 query rows of a work tile in the registers of the scoring warpgroup, Q Kᵀ, masking, and stores of
// probabilities. Used by CTA pairs and CTA groups.
#pragma once

#include <type_traits>

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/decode/sm90/work_tile_rows.cuh"
#include "kernels/mla/sm90/config.hpp"

namespace ringattn::sm90 {

using MlaScores = float[kMlaKeyTile / 8][4];
using MlaProbabilities = std::uint32_t[kMlaKeyTile / 16][4];

// A fragments of S = Q Kᵀ.
template <class C>
class QueryRows {
 public:
  static constexpr int kSteps = kLatentDim / 16;

  // Loads the queries. Missing rows are zeros. Calls issued() once the loads are issued.
  template <class Issued>
  __device__ __forceinline__ void load(const DecodeParams& params, const DecodeWorkTile& work_tile, Issued issued) {
    const cuda::AttentionParams& p = params.attention;
    const auto* const q = static_cast<const std::uint16_t*>(p.q.data);
    const int rows = rows_of(params, work_tile);
    const std::uint16_t* row[2];
    bool present[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = tile_row_of_thread() + 8 * half;
      present[half] = tile_row < rows;
      const DecodeCoord coord = coord_of(params, work_tile, tile_row < rows ? tile_row : 0);
      row[half] = q + coord.row * p.q.token_stride + coord.query_head * p.q.head_stride;
    }
    const bool aligned =
        ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p.q.token_stride | p.q.head_stride))) &
         15U) == 0;
    const int lane = thread_of_cta() % 4;
    uint4 chunk[kSteps / 2][2];  // 32 columns per quad
    const auto load = [&](auto is_aligned) {
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          chunk[i][half] = uint4{0, 0, 0, 0};
          if (present[half]) chunk[i][half] = load_elements(row[half] + (i * 4 + lane) * 8, is_aligned);
        }
      }
    };
    if (aligned) {
      load(std::true_type());
    } else {
      load(std::false_type());
    }
    issued();
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 turned = transpose_in_quad(chunk[i][half], lane);
        q_[2 * i][half] = turned.x;
        q_[2 * i][2 + half] = turned.y;
        q_[2 * i + 1][half] = turned.z;
        q_[2 * i + 1][2 + half] = turned.w;
      }
    }
  }

  // Issues k steps [kBegin, kEnd) of 16 columns. `panels`: panels of the keys, from that of kBegin on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void multiply(MlaScores& s, std::uint32_t panels) const {
    constexpr int kPanelSteps = kPanelColumns / 16;
    const std::uint32_t k = warp_uniform(descriptor_low(panels));
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      const int i = step - kBegin / kPanelSteps * kPanelSteps;
      const auto at =
          static_cast<std::uint32_t>((i / kPanelSteps * cuda::panel_bytes(kMlaKeyTile) + i % kPanelSteps * 32) >> 4);
      Wgmma<typename C::Element, kMlaKeyTile>::rk(s, q_[step], descriptor(k + at), step > 0);
    }
  }

 private:
  std::uint32_t q_[kSteps][4];
};

// Scales scores if the spec scales them before masking. `special`: not all rows see all keys of the tile, so it is
// masked. `number`: the tile's index in its sequence.
template <class C>
__device__ __forceinline__ void scale_and_mask(const cuda::AttentionParams& p, MlaScores& s,
                                               const ThreadRows& thread_rows, int number, bool special) {
  if (p.softmax.scaled_first) scale_scores(p, s);
  if (!special) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mask_scores<0, kMlaKeyTile / 8>(p, s, half, visible_columns<C>(thread_rows, half, number));
  }
}

// Stores a warp's rows of a tile's probabilities as the A operand of P V. stmatrix stores four 8x8 matrices at a time,
// and each lane gives the address of one row.
__device__ __forceinline__ void store_probabilities(std::uint32_t to, const MlaProbabilities& probability) {
  const int lane = thread_of_cta() % 32;
  const int row = thread_of_warpgroup() / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kMlaKeyTile / 16; ++step) {
    store_matrix(to + cuda::swizzled(row, 2 * step + lane / 16), probability[step]);
  }
}

}  // namespace ringattn::sm90
