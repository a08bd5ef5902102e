// SPDX-License-Identifier: Apache-2.0
// When the softmax offset of a row moves in MLA decode: as soon as a score exceeds it by more than
// kMlaRescaleThreshold.
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/mla/sm90/config.hpp"

namespace ringattn::sm90 {

// Row maxima of S · c in a tile, for a thread's two rows. Both are reduced together to overlap the shuffles' latency.
template <int kBlocks>
__device__ __forceinline__ void max_scores(const cuda::AttentionParams& p, const float (&s)[kBlocks][4],
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

// The softmax offset after a tile, from the one before it. −∞: no key was visible so far. Branch-free.
__device__ __forceinline__ float offset_after(float old, float row_max) {
  const int unset = static_cast<int>(old == -INFINITY);
  const int any = static_cast<int>(row_max > -INFINITY);
  const int exceeds = static_cast<int>(__fsub_rn(row_max, old) > kMlaRescaleThreshold);
  return ((unset & any) | (~unset & exceeds)) != 0 ? row_max : old;
}

// True if a row that has seen a key gets a new offset, so that its sum and outputs must be rescaled.
__device__ __forceinline__ bool offset_moves(float old, float now) { return old != -INFINITY && now != old; }
// Factor by which a row's sum and outputs are rescaled.
__device__ __forceinline__ float factor_between(float old, float now) {
  return offset_moves(old, now) ? cuda::exp2_approx(__fsub_rn(old, now)) : 1.0F;
}

}  // namespace ringattn::sm90
