// SPDX-License-Identifier: Apache-2.0
// When a row's softmax_offset moves while latents are folded: as soon as a score lies more than kFarAbove above it.
#pragma once

#include "kernels/cuda/attention_params.hpp"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/latent/config.hpp"

namespace ringattn::sm90 {

// The greatest S · c of a thread's two rows in a tile. Both rows at once, as each waits for its neighbours' shares.
template <int kBlocks>
__device__ __forceinline__ void greatest_scores(const cuda::AttentionParams& p, const float (&s)[kBlocks][4],
                                                float (&row_max)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_max[half] = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int j = 1; j < kBlocks; ++j) row_max[half] = fmaxf(row_max[half], fmaxf(s[j][2 * half], s[j][2 * half + 1]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) row_max[half] = __fmul_rn(over_quad(row_max[half]), p.softmax.exponent_base2);
}

// A row's softmax_offset behind a tile, from the one before it; −∞: the row has seen nothing. Without branches.
__device__ __forceinline__ float offset_after(float old, float row_max) {
  const int unset = static_cast<int>(old == -INFINITY);
  const int some = static_cast<int>(row_max > -INFINITY);
  const int far = static_cast<int>(__fsub_rn(row_max, old) > kFarAbove);
  return ((unset & some) | (~unset & far)) != 0 ? row_max : old;
}

// Whether a row that has seen something has another softmax_offset now, and so what it has is to be scaled.
__device__ __forceinline__ bool offset_moves(float old, float now) { return old != -INFINITY && now != old; }
// What of a row is to be scaled by.
__device__ __forceinline__ float factor_between(float old, float now) {
  return offset_moves(old, now) ? cuda::exp2_approx(__fsub_rn(old, now)) : 1.0F;
}

}  // namespace ringattn::sm90
