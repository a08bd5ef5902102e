// SPDX-License-Identifier: Apache-2.0
// The tile step, in registers: scores of 64 rows and one key tile become probabilities, and the current KV split's
// partial (r, l, A) = (softmax_offset, sum, acc) is updated:
//   t = S · c − r       p = exp2(t)       l ← l + Σ p       A ← A + Σ p · v
// S is Q Kᵀ, and −∞ where the row does not see the key. c = softmax_scale · log₂ e. With a soft-cap, or a scale that is
// not positive, S is capped and scaled first, and c = log₂ e.
//
// The softmax_offset r is not the running maximum. It is the largest S · c of the split's first tile in which the row
// sees a key. It moves only when the row's probabilities exceed kRescaleThreshold. Then the tile is recomputed with the
// larger softmax_offset. So most tiles need no row maximum and no rescaling. Each row decides for
// itself, and the other rows of its warp keep their values.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/scaled_score.cuh"
#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/threads.cuh"

namespace ringattn::sm90 {

// Maximum of a thread's share of a tile's Σ p. bf16 is equally precise at any magnitude, fp16 below its largest value.
// The rest of fp32's range, up to 2^128, is left for the sum over 2^31 keys and for V.
template <class Element>
inline constexpr float kRescaleThreshold = 0x1p60F;
template <>
inline constexpr float kRescaleThreshold<__half> = 0x1p15F;

// A thread's share of its two rows: row n (half 0) and row n + 8 (half 1) of its warp's 16. Columns are in the order of
// the wgmma fragments.
template <class C>
struct AttentionState {
  float o[C::kDimV / 8][4];  // acc of the current split
  float shift[2];            // −r; 0 while the split has seen no key
  float l[2];                // over this thread's columns
  std::uint32_t flags;

  // The next tile is not plain: rows have no softmax_offset yet, or scores are scaled first, which holds for every
  // tile.
  static constexpr std::uint32_t kSpecial = 1;
  static constexpr std::uint32_t kOffsetSet = 2;       // r is set in half 0; 4: in half 1
  static constexpr std::uint32_t kMerged = 8;          // half 0 has merged splits; 16: half 1 has
  static constexpr std::uint32_t kCurrent = 32;        // the current split has keys
  static constexpr std::uint32_t kSplitComplete = 64;  // the current split ends with the last tile of the task
  static constexpr std::uint32_t kWriting = 128;  // the TMA store of the previous Q stage's rows may still be reading
  // this thread releases stages for the warpgroup, each leader to one CTA
  static constexpr std::uint32_t kLeader = 256;
  static constexpr std::uint32_t kOverwriteAcc = 512;  // the next P V is the first of its split
  // kSpecial, kCurrent, kSplitComplete and kOverwriteAcc are warpgroup-uniform.
  // The bits above hold the warpgroup's Q stage and its parity. Incrementing them wraps around without a mask.
  static constexpr int kQStageShift = C::kQStages == 1 ? 31 : 30;
  static_assert(C::kQStages <= 2);
  static constexpr std::uint32_t kNextQStage = 1U << kQStageShift;

  static constexpr std::uint32_t kKept = kLeader | ~(kNextQStage - 1);  // kept from one head work tile to the next

  __device__ PackedPipelineState<C::kQStages> q_stage() const { return {flags >> kQStageShift}; }

  __device__ bool has(std::uint32_t flag) const { return (flags & flag) != 0; }
  __device__ bool has_offset(int half) const { return has(kOffsetSet << half); }
  __device__ bool has_merged(int half) const { return has(kMerged << half); }
};

// The softmax_offset of a thread's row; −∞ while its split has seen no key.
template <class C>
__device__ __forceinline__ float offset_of(const AttentionState<C>& rows, int half) {
  return rows.has_offset(half) ? -rows.shift[half] : -INFINITY;
}

// Sums over the quad of threads that share a row. All four get the result.
__device__ __forceinline__ float sum_of_quad(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, 2));
}

// Keys of a tile that a row sees: columns [low, high), relative to the thread's first column. The range may extend
// outside the tile.
struct Columns {
  int low, high;
};

template <class C>
__device__ __forceinline__ Columns visible_columns(const HeadWorkTile& head_tile, int half, int number) {
  const int column = thread_of_cta() % 4 * 2;
  const int key = (number - head_tile.origin()) * C::kKeyTile + column;  // key offset from the origin
  const int tile_row = tile_row_of_thread() + 8 * half;
  const int to = head_tile.to() + tile_row;
  const int length = head_tile.length();
  return {head_tile.from() + tile_row - key, (to < length ? to : length) - key};
}

// Blocks [kFrom, kTo) of s start at column `first` · 8.
template <int kFrom, int kTo, int kBlocks>
__device__ __forceinline__ void mask_scores(const cuda::AttentionParams& p, float (&s)[kBlocks][4], int half,
                                            const Columns& columns, int first = 0) {
#pragma unroll
  for (int j = kFrom; j < kTo; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((first + j) * 8 + i >= columns.high) s[j][2 * half + i] = -INFINITY;
    }
  }
  if (p.mask.left < 0) return;
#pragma unroll
  for (int j = kFrom; j < kTo; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((first + j) * 8 + i < columns.low) s[j][2 * half + i] = -INFINITY;
    }
  }
}

// Masks keys that rows don't see. If all rows see the first half of the columns, that half is skipped.
template <class C, int kBlocks>
__device__ __forceinline__ void mask_tile(const cuda::AttentionParams& p, const HeadWorkTile& head_tile, int number,
                                          float (&s)[kBlocks][4]) {
  constexpr int kFirst = kBlocks / 2;
  const Columns columns[2] = {visible_columns<C>(head_tile, 0, number), visible_columns<C>(head_tile, 1, number)};
  const int end = (number - head_tile.origin()) * C::kKeyTile + kFirst * 8;
  if (p.mask.left >= 0 || head_tile.to() < end || head_tile.length() < end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) mask_scores<0, kFirst>(p, s, half, columns[half]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) mask_scores<kFirst, kBlocks>(p, s, half, columns[half]);
}

template <int kBlocks>
__device__ __forceinline__ void scale_scores(const cuda::AttentionParams& p, float (&s)[kBlocks][4]) {
  const cuda::ScoreScaling scaling(p.softmax);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = scaling.scaled(s[j][i]);
  }
}

// Maximum over the quad of threads that share a row. fmaxf ignores NaN.
__device__ __forceinline__ float over_quad(float maximum) {
  maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
  return fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
}

// Sets the softmax_offset of rows that have none and see a key here.
template <class C, int kBlocks>
__device__ __forceinline__ void fix_offset(const cuda::AttentionParams& p, AttentionState<C>& rows,
                                           const float (&s)[kBlocks][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max_score[2] = {s[0][2 * half], s[0][2 * half + 1]};
#pragma unroll
    for (int j = 1; j < kBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) max_score[i] = fmaxf(max_score[i], s[j][2 * half + i]);
    }
    const float maximum = over_quad(fmaxf(max_score[0], max_score[1]));
    if (!rows.has_offset(half) && maximum > -INFINITY) {
      rows.flags |= AttentionState<C>::kOffsetSet << half;
      rows.shift[half] = -__fmul_rn(maximum, p.softmax.exponent_base2);
    }
  }
}

// Scores → probabilities, in place, and the thread's shares of their sums.
template <class C, int kBlocks>
__device__ __forceinline__ void exponentiate(const cuda::AttentionParams& p, const float (&shift)[2],
                                             float (&s)[kBlocks][4], float (&sum)[2]) {
  const float c = p.softmax.exponent_base2;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[j][2 * half + i];
        x = cuda::exp2_approx(__fmaf_rn(x, c, shift[half]));
        sum[half] = j + i == 0 ? x : __fadd_rn(sum[half], x);
      }
    }
  }
}

// Rounds P to the element type, in the order of the A fragments of P V.
template <class C, int kBlocks>
__device__ __forceinline__ void pack(const float (&s)[kBlocks][4], std::uint32_t (&probability)[kBlocks / 2][4]) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      probability[j / 2][2 * (j % 2) + half] =
          cuda::MmaTraits<typename C::Element>::pack(s[j][2 * half], s[j][2 * half + 1]);
    }
  }
}

// The tile step once more, for rows that exceed the rescale threshold. This is rare, so the code is short rather than
// fast. A warp recomputes its 16 rows' scores by mma.sync, 16 keys at a time: once for their maximum, and once more for
// their exponentials. Rows within the threshold keep their values.

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
