// SPDX-License-Identifier: Apache-2.0
// A work_tile's 64 query rows in the registers of the warpgroup that scores, and what it does with them and with what
// comes of them, whoever it shares the work_tile with.
#pragma once

#include <type_traits>

#include "kernels/sm90/decode/slots.cuh"
#include "kernels/sm90/fold/gemms.cuh"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/ptx/matrix.cuh"

namespace ringattn::sm90 {

using MlaScores = float[kMlaKeyTile / 8][4];
using MlaProbabilities = std::uint32_t[kMlaKeyTile / 16][4];

// Fragments of the first product.
template <class C>
class QueryRows {
 public:
  static constexpr int kSteps = kLatentDim / 16;

  // AttentionState that are not there are zeros. asked(): once they are on their way.
  template <class Asked>
  __device__ __forceinline__ void load(const DecodeParams& params, const DecodeWorkTile& work_tile, Asked asked) {
    const cuda::AttentionParams& p = params.attention;
    const auto* const q = static_cast<const std::uint16_t*>(p.q.data);
    const int rows = rows_of(params, work_tile);
    const std::uint16_t* row[2];
    bool present[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = tile_row_of_thread() + 8 * half;
      present[half] = slot < rows;
      const DecodeCoord coord = coord_of(params, work_tile, slot < rows ? slot : 0);
      row[half] = q + coord.row * p.q.token_stride + coord.query_head * p.q.head_stride;
    }
    const bool aligned =
        ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p.q.token_stride | p.q.head_stride))) &
         15U) == 0;
    const int lane = thread_of_cta() % 4;
    uint4 chunk[kSteps / 2][2];  // of 32 columns each
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
    asked();
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 turned = turn_in_quad(chunk[i][half], lane);
        q_[2 * i][half] = turned.x;
        q_[2 * i][2 + half] = turned.y;
        q_[2 * i + 1][half] = turned.z;
        q_[2 * i + 1][2 + half] = turned.w;
      }
    }
  }

  // Issues the products of steps [kBegin, kEnd) of 16 columns. `panels`: of the keys, from kBegin's on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void multiply(MlaScores& s, std::uint32_t panels) const {
    constexpr int kPanelSteps = kPanelColumns / 16;
    const std::uint32_t k = of_warp(descriptor_low(panels));
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

// Scales scores first where the step says so, and masks those of a tile with this number in its sequence where
// `special`: not all rows see all of it.
template <class C>
__device__ __forceinline__ void see_scores(const cuda::AttentionParams& p, MlaScores& s, const ThreadRows& slots,
                                           int number, bool special) {
  if (p.softmax.scaled_first) scale_scores(p, s);
  if (!special) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mask_scores<0, kMlaKeyTile / 8>(p, s, half, visible_columns<C>(slots, half, number));
  }
}

// A warp's rows of a tile's probabilities, as the second product reads them. Four matrices of 8 rows and 8 keys at a
// time: lanes give the addresses of their rows.
__device__ __forceinline__ void store_probabilities(std::uint32_t to, const MlaProbabilities& probability) {
  const int lane = thread_of_cta() % 32;
  const int row = thread_of_warpgroup() / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kMlaKeyTile / 16; ++step) {
    store_matrix(to + cuda::swizzled(row, 2 * step + lane / 16), probability[step]);
  }
}

}  // namespace ringattn::sm90
