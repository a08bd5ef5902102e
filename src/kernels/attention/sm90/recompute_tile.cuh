// SPDX-License-Identifier: Apache-2.0
// The tile step once more, for rows that exceed the rescale threshold. This is rare, so the code is short rather than
// fast. A warp recomputes its 16 rows' scores by mma.sync, 16 keys at a time: once for their maximum, and once more for
// their exponentials. Rows within the threshold keep their values.
#pragma once

#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm90 {

// Scores of 16 keys, scaled and capped but not masked.
template <class C>
__device__ __forceinline__ void recompute_scores(const cuda::AttentionParams& p, float (&s)[2][4], std::uint32_t q_tile,
                                                 std::uint32_t k_tile, int block) {
  const int lane = thread_of_cta() % 32;
  const int warp = thread_of_cta() / 32 % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0.0F;
  }
  const std::uint32_t q_at = q_tile + cuda::swizzled(warp * 16 + lane % 16, lane / 16);
  const std::uint32_t k_at = k_tile + cuda::swizzled(block * 16 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll 1
  for (int step = 0; step < C::kDim / 16; ++step) {
    std::uint32_t a[4];
    std::uint32_t b[4];
    cuda::load_matrix(a, cuda::at_columns<kQueryTile>(q_at, step));
    cuda::load_matrix(b, cuda::at_columns<C::kKeyTile>(k_at, step));
    cuda::MmaTraits<typename C::Element>::mma(s[0], a, b[0], b[1], s[0]);
    cuda::MmaTraits<typename C::Element>::mma(s[1], a, b[2], b[3], s[1]);
  }
  if (p.softmax.scaled_first) scale_scores(p, s);
}

// The results for both rows of a thread.
template <class C>
struct Recomputed {
  float s[C::kKeyTile / 8][4];  // probabilities
  float sum[2];
  float shift[2];
  float factor[2];  // rescales what was accumulated with the old softmax_offset
  bool exceeds_threshold[2];
};

// Not inlined, and with its results in memory, so that it costs the main loop no registers.
template <class C, class AnyWorkTile>
__device__ __noinline__ void recompute_key_tile(const cuda::AttentionParams& p, AnyWorkTile head_tile, int number,
                                                std::uint32_t q_tile, std::uint32_t k_tile, float shift0, float shift1,
                                                float sum0, float sum1, Recomputed<C>& result) {
  const float old_shift[2] = {shift0, shift1};
  const float old_sum[2] = {sum0, sum1};
  const Columns columns[2] = {visible_columns<C>(head_tile, 0, number), visible_columns<C>(head_tile, 1, number)};
  float max_score[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
  for (int block = 0; block < C::kKeyTile / 16; ++block) {
    float s[2][4];
    recompute_scores<C>(p, s, q_tile, k_tile, block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mask_scores<0, 2>(p, s, half, columns[half], 2 * block);
      max_score[half] = fmaxf(
          max_score[half], fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1])));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // The quad decides together.
    int any = old_sum[half] > kRescaleThreshold<typename C::Element> ? 1 : 0;
    any |= __shfl_xor_sync(0xffffffffU, any, 1);
    any |= __shfl_xor_sync(0xffffffffU, any, 2);
    const float softmax_offset =
        fmaxf(-old_shift[half], __fmul_rn(over_quad(max_score[half]), p.softmax.exponent_base2));
    result.exceeds_threshold[half] = any != 0;
    result.shift[half] = any != 0 ? -softmax_offset : old_shift[half];
    result.factor[half] = cuda::exp2_approx(__fsub_rn(result.shift[half], old_shift[half]));
    result.sum[half] = 0.0F;
  }
#pragma unroll 1
  for (int block = 0; block < C::kKeyTile / 16; ++block) {
    float s[2][4];
    recompute_scores<C>(p, s, q_tile, k_tile, block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mask_scores<0, 2>(p, s, half, columns[half], 2 * block);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x =
              cuda::exp2_approx(__fmaf_rn(s[j][2 * half + i], p.softmax.exponent_base2, result.shift[half]));
          result.sum[half] = __fadd_rn(result.sum[half], x);
          result.s[2 * block + j][2 * half + i] = x;
        }
      }
    }
  }
}

// Applies the results. The current split's sum and acc are rescaled. Merged splits have an offset of their own.
template <class C>
__device__ __forceinline__ void take_over(const Recomputed<C>& recomputed, AttentionState<C>& rows,
                                          float (&s)[C::kKeyTile / 8][4], float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!recomputed.exceeds_threshold[half]) continue;
    sum[half] = recomputed.sum[half];
    rows.shift[half] = recomputed.shift[half];
    rows.l[half] = __fmul_rn(rows.l[half], recomputed.factor[half]);
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {
      rows.o[n][2 * half] = __fmul_rn(rows.o[n][2 * half], recomputed.factor[half]);
      rows.o[n][2 * half + 1] = __fmul_rn(rows.o[n][2 * half + 1], recomputed.factor[half]);
    }
#pragma unroll
    for (int j = 0; j < C::kKeyTile / 8; ++j) {
      s[j][2 * half] = recomputed.s[j][2 * half];
      s[j][2 * half + 1] = recomputed.s[j][2 * half + 1];
    }
  }
}

}  // namespace ringattn::sm90
