// SPDX-License-Identifier: Apache-2.0
// C · Bᵀ of a chunk, computed once for all heads of a CTA, and what each head makes of it: weights of tokens j in rows
// i, scores · a(tokens j + 1 … i) · dt_j, in two parts, as a right operand of wgmma with rows i.
#pragma once

#include "kernels/sm90/scan/ssd_band.cuh"

namespace ringattn::sm90 {

// Where block (row, column) of 16 × 16 lies, in floats; column ≤ row.
__device__ __forceinline__ int score_block(int row, int column) {
  return (row * (row + 1) / 2 + column) * kScoreBlockFloats;
}

// By the warpgroup that has fetched B and C, which has few registers: scores of a chunk, on and below the diagonal.
template <int kStates>
__device__ __forceinline__ void score_chunk(std::uint32_t c_tile, std::uint32_t b_tile, float* scores) {
  using Multiply = cuda::Products<__nv_bfloat16>;
  const int lane = thread_of_warpgroup() % 32;
#pragma unroll 1
  for (int block = thread_of_warpgroup() / 32; block < kScoreBlocks; block += kWarpgroup / 32) {
    const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    const int column = block - row * (row + 1) / 2;
    const std::uint32_t c = c_tile + cuda::swizzled(16 * row + lane % 16, lane / 16);
    const std::uint32_t b = b_tile + cuda::swizzled(16 * column + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float sums[2][4] = {};
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      std::uint32_t left[4];
      std::uint32_t right[4];
      cuda::load_matrix(left, cuda::at_columns<kChunk>(c, k));
      cuda::load_matrix(right, cuda::at_columns<kChunk>(b, k));
      Multiply::mma(sums[0], left, right[0], right[1], sums[0]);
      Multiply::mma(sums[1], left, right[2], right[3], sums[1]);
    }
    float* const target = scores + block * kScoreBlockFloats + lane / 4 * kScorePitch + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      *reinterpret_cast<float2*>(target + 8 * t) = make_float2(sums[t][0], sums[t][1]);
      *reinterpret_cast<float2*>(target + 8 * kScorePitch + 8 * t) = make_float2(sums[t][2], sums[t][3]);
    }
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
