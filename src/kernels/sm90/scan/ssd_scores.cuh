// SPDX-License-Identifier: Apache-2.0
// C · Bᵀ of a chunk, computed once for all bands of a CTA, and what each head makes of it: weights of tokens j in rows
// i, scores · a(tokens j + 1 … i) · dt_j, in two parts, as a right operand of wgmma with rows i.
#pragma once

#include "kernels/sm90/scan/ssd_band.cuh"

namespace ringattn::sm90 {

// Where block (row, column) of 16 × 16 lies, in floats; column ≤ row.
__device__ __forceinline__ int score_block(int row, int column) {
  return (row * (row + 1) / 2 + column) * kScoreBlockFloats;
}

// Scores of a chunk by a warpgroup. A thread has columns 8 j + column_of_thread() + {0, 1} of row slot_of_thread() in
// [j][0, 1], and of the row 8 below in [j][2, 3].
template <int kStates>
__device__ __forceinline__ void score_chunk(std::uint32_t c_tile, std::uint32_t b_tile,
                                            float (&scores)[kChunk / 8][4]) {
  const std::uint32_t c = of_warp(descriptor_low(c_tile));
  const std::uint32_t b = of_warp(descriptor_low(b_tile));
  pin(scores);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStates / 16; ++k) {
    const auto at = static_cast<std::uint32_t>((k / 4 * kBandTileBytes + k % 4 * 32) >> 4);
    Wgmma<__nv_bfloat16, kChunk>::ss(scores, descriptor(c + at), descriptor(b + at), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(scores);
}

// Those on and below the diagonal's blocks.
__device__ __forceinline__ void store_scores(const float (&scores)[kChunk / 8][4], float* to) {
  const int row = thread_of_warpgroup() / 32;
  const int lane = thread_of_warpgroup() % 32;
  float* const target = to + score_block(row, 0) + lane / 4 * kScorePitch + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kChunk / 8; ++j) {
    if (j / 2 > row) break;
    float* const block = target + j / 2 * kScoreBlockFloats + j % 2 * 8;
    *reinterpret_cast<float2*>(block) = make_float2(scores[j][0], scores[j][1]);
    *reinterpret_cast<float2*>(block + 8 * kScorePitch) = make_float2(scores[j][2], scores[j][3]);
  }
}

// Weights of kCount tokens from `column` on in row `row` of a chunk; 0 behind the row's own token, which has D, the
// `skip`, besides.
template <bool kDiagonal, int kCount>
__device__ __forceinline__ void weigh_scores(const float* scores, const float* steps, float skip,
                                             unsigned char* weights, int row, int column) {
  const float sum = steps[row];
  const float* const from = scores + score_block(row / 16, column / 16) + row % 16 * kScorePitch + column % 16;
  std::uint32_t hi[kCount / 2];
  std::uint32_t lo[kCount / 2];
#pragma unroll
  for (int quarter = 0; quarter < kCount / 4; ++quarter) {
    const int at = column + 4 * quarter;
    const float4 score = *reinterpret_cast<const float4*>(from + 4 * quarter);
    const float4 to = *reinterpret_cast<const float4*>(steps + at);
    const float4 dt = *reinterpret_cast<const float4*>(steps + kChunk + at);
    const auto weigh = [&](int i, float value, float before, float step) {
      const float decayed = __fmul_rn(value, cuda::exp2_approx(__fsub_rn(sum, before)));
      const float weight = __fmul_rn(decayed, step);
      if (!kDiagonal) return weight;
      return at + i <= row ? __fadd_rn(weight, at + i == row ? skip : 0.0F) : 0.0F;
    };
    cuda::split(weigh(0, score.x, to.x, dt.x), weigh(1, score.y, to.y, dt.y), hi[2 * quarter], lo[2 * quarter]);
    cuda::split(weigh(2, score.z, to.z, dt.z), weigh(3, score.w, to.w, dt.w), hi[2 * quarter + 1], lo[2 * quarter + 1]);
  }
  unsigned char* const target = weights + cuda::swizzled(row, column / 8) + column % 8 * 2;
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(target) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    *reinterpret_cast<uint4*>(target + kBandTileBytes) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(hi[0], hi[1]);
    *reinterpret_cast<uint2*>(target + kBandTileBytes) = make_uint2(lo[0], lo[1]);
  }
}

// All weights of a chunk by a warpgroup, on and below the diagonal. Each warp has a block on it, one below it, and half
// of another one. The steps are those of the chunk; hi parts begin at `weights`, lo parts follow.
__device__ __forceinline__ void weigh_chunk(const float* scores, const float* steps, float skip,
                                            unsigned char* weights) {
  const int warp = thread_of_warpgroup() / 32;
  const int lane = thread_of_warpgroup() % 32;
  const int row = lane % 16;
  weigh_scores<true, 8>(scores, steps, skip, weights, 16 * warp + row, 16 * warp + lane / 16 * 8);
  // (1, 0), (2, 0), (2, 1), (3, 0); then (3, 1) for the first two warps, and (3, 2) for the others.
  const int block_row = warp == 0 ? 1 : warp == 3 ? 3 : 2;
  const int block_column = warp == 2 ? 1 : 0;
  weigh_scores<false, 8>(scores, steps, 0.0F, weights, 16 * block_row + row, 16 * block_column + lane / 16 * 8);
  weigh_scores<false, 4>(scores, steps, 0.0F, weights, 48 + row, 16 * (1 + warp / 2) + warp % 2 * 8 + lane / 16 * 4);
}

}  // namespace ringattn::sm90
