// SPDX-License-Identifier: Apache-2.0
// Online softmax of one KV tile within a KV split, (m, l, O) ← attend((m, l, O), tile), in registers:
//   x  = S, −∞ where masked                 m′ = max(m, max x)
//   p  = exp2(x · c − m′ · c)               s  = exp2((m − m′) · c)
//   l′ = l · s + Σ p                        O′ = O · s + Σ p · v
// S is Q Kᵀ, and c = softmax_scale · log₂ e. With a soft-cap, or a scale that is not positive, S is capped and scaled
// first and c = log₂ e. The tensor cores accumulate Σ p · v of a tile from zero, with truncation. The fp32 units add
// tiles, rounded to nearest.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/key_positions.hpp"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

// Columns of O that a warp holds: all columns of its rows, or a slice of them.
template <class C>
inline constexpr int kWarpColumns = C::kDimV / C::kSlices;

// The accumulators of a warp's rows in mma.sync's fragment layout. Thread t of a quad holds columns 8n + 2t and
// 8n + 2t + 1 of row r (elements 0, 1) and of row r + 8 (elements 2, 3). Warps that share rows all hold the same m and
// l.
template <class C>
struct AttentionState {
  float o[C::kRowBlocks][kWarpColumns<C> / 8][4];
  float m[C::kRowBlocks][2];
  float l[C::kRowBlocks][2];
};

// Scales, and caps, scores before their maximum is taken, if AttentionParams::Softmax::scaled_first is set.
__device__ __forceinline__ void scale_scores(const cuda::AttentionParams::Softmax& softmax, float (&s)[4]) {
  // cap · tanh(x / cap) = cap − 2 cap / (e^(2x / cap) + 1). The absolute error is a few 2⁻²³ of the cap.
  const float inner = softmax.cap > 0.0F ? 2.88539008F * softmax.scale / softmax.cap : 0.0F;
  const float outer = -2.0F * softmax.cap;
#pragma unroll
  for (float& x : s) {
    x = softmax.cap > 0.0F
            ? __fmaf_rn(outer, cuda::reciprocal_approx(__fadd_rn(cuda::exp2_approx(__fmul_rn(x, inner)), 1.0F)),
                        softmax.cap)
            : __fmul_rn(x, softmax.scale);
  }
}

// `Rows` has the rows' positions: key_length(), and positions(tile_row, first_key), which returns a function from an
// offset to the position of row tile_row + offset, relative to first_key. If C::kPositions, keys have explicit
// positions.
template <class C, class Rows>
class TileStep {
 public:
  using Element = typename C::Element;
  static_assert(C::kSlices == 1);

  __device__ TileStep(const cuda::AttentionParams& p, const Rows& rows, std::uint32_t q_tile)
      : p_(p), rows_(rows), q_tile_(q_tile) {}

  // k_tile and v_tile are addresses in shared memory. first_key() returns the tile's first key, or the address of its
  // keys' positions, and is called only if the tile is masked. `between` is called after K has been read.
  template <class FirstKey, class Between>
  __device__ __forceinline__ void attend(AttentionState<C>& state, std::uint32_t k_tile, std::uint32_t v_tile,
                                         bool masked, FirstKey&& first_key, Between&& between) const {
    float s[C::kRowBlocks][C::kKeyTile / 8][4];
    qk_gemm(s, k_tile);
    between();
    if (p_.softmax.scaled_first) {
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) scale_scores(p_.softmax, s[b][n]);
      }
    }
    if (masked) {
      if constexpr (C::kPositions) {
        mask_by_positions(s, reinterpret_cast<const std::int32_t*>(first_key()));
      } else {
        mask_scores(s, first_key());
      }
    }

    std::uint32_t probability[C::kRowBlocks][C::kKeyTile / 16][4];
    float scale[C::kRowBlocks][2];
    exponentiate(state, s, probability, scale);
    // Never taken. It ends the basic block. If softmax and P V are one basic block and registers are scarce, ptxas
    // (13.0) serializes P V's MMAs two at a time. Other configurations are faster without it.
    if (C::kEndBasicBlock && p_.heads == 0) __trap();
    pv_gemm(state, probability, scale, v_tile);
  }

 private:
  using Scores = float[C::kRowBlocks][C::kKeyTile / 8][4];
  using Probabilities = std::uint32_t[C::kRowBlocks][C::kKeyTile / 16][4];

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }

  __device__ __forceinline__ void qk_gemm(Scores& s, std::uint32_t k_tile) const {
    const std::uint32_t q_at = q_tile_ + cuda::swizzled(warp() * C::kRowBlocks * 16 + lane() % 16, lane() / 16);
    const std::uint32_t k_at = k_tile + cuda::swizzled(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      std::uint32_t a[C::kRowBlocks][4];
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
        cuda::load_matrix(a[b], cuda::at_columns<C::kQueryTile>(q_at, step) +
                                    static_cast<std::uint32_t>(b * 16 * cuda::kPanelRowBytes));
      }
#pragma unroll
      for (int n = 0; n < C::kKeyTile / 16; ++n) {
        std::uint32_t k[4];
        cuda::load_matrix(
            k, cuda::at_columns<C::kKeyTile>(k_at, step) + static_cast<std::uint32_t>(n * 16 * cuda::kPanelRowBytes));
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; ++b) {
          cuda::multiply<Element>(s[b][2 * n], a[b], k[0], k[1], step == 0);
          cuda::multiply<Element>(s[b][2 * n + 1], a[b], k[2], k[3], step == 0);
        }
      }
    }
  }

  __device__ __forceinline__ void mask_scores(Scores& s, std::int64_t first_key) const {
    // Positions are relative to the tile's first key, to save registers.
    const Visibility visibility(p_.mask, rows_.key_length() - first_key);
    const auto position = rows_.positions(warp() * C::kRowBlocks * 16 + lane() / 4, first_key);
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const ColumnRange seen = columns_of(visibility.keys(position(16 * b + 8 * half)), 0, C::kKeyTile);
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + lane() % 4 * 2 + i;
            if (key < seen.begin || key >= seen.end) s[b][n][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }

  // positions: [kKeyTile] in global memory, kNoPosition if the sequence has no such key.
  __device__ __forceinline__ void mask_by_positions(Scores& s, const std::int32_t* positions) const {
    const auto position = rows_.positions(warp() * C::kRowBlocks * 16 + lane() / 4, 0);
    PositionSpan seen[C::kRowBlocks][2];
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        seen[b][half] = positions_within(Visibility(p_.mask, 0).mask_range(position(16 * b + 8 * half)));
      }
    }
#pragma unroll
    for (int n = 0; n < C::kKeyTile / 8; ++n) {
      const int2 keys = __ldg(reinterpret_cast<const int2*>(positions + n * 8 + lane() % 4 * 2));
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!seen[b][half].has(keys.x)) s[b][n][2 * half] = -INFINITY;
          if (!seen[b][half].has(keys.y)) s[b][n][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // Turns scores into probabilities, and updates m and l. fmaxf passes NaN over, but its p is NaN.
  __device__ __forceinline__ void exponentiate(AttentionState<C>& state, Scores& s, Probabilities& probability,
                                               float (&scale)[C::kRowBlocks][2]) const {
    const float c = p_.softmax.exponent_base2;
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = s[b][0][2 * half];
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) maximum = fmaxf(maximum, s[b][n][2 * half + i]);
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
        const float m_old = state.m[b][half];
        const float m_new = fmaxf(m_old, maximum);
        // If m_new is −∞, every score so far is −∞, and exp2(−∞) = 0.
        const float softmax_offset = m_new == -INFINITY ? 0.0F : m_new;
        state.m[b][half] = m_new;
        // The difference is taken first, so that an unchanged maximum scales by exactly 1.
        scale[b][half] = cuda::exp2_approx(__fmul_rn(__fsub_rn(m_old, softmax_offset), c));
        const float shift = __fmul_rn(-softmax_offset, c);
        float sum = 0.0F;
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = s[b][n][2 * half + i];
            x = cuda::exp2_approx(__fmaf_rn(x, c, shift));
            sum = __fadd_rn(sum, x);
          }
        }
        state.l[b][half] = __fmaf_rn(state.l[b][half], scale[b][half], sum);
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
          probability[b][n / 2][2 * (n % 2) + half] =
              cuda::MmaTraits<Element>::pack(s[b][n][2 * half], s[b][n][2 * half + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void pv_gemm(AttentionState<C>& state, const Probabilities& probability,
                                          const float (&scale)[C::kRowBlocks][2], std::uint32_t v_tile) const {
    const std::uint32_t v_at = v_tile + cuda::swizzled(lane() % 16, lane() / 16);
    constexpr int kColumns = C::kColumnsAtOnce;  // blocks of 16 columns accumulated concurrently
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; n += kColumns) {
      float sum[kColumns][C::kRowBlocks][2][4];
#pragma unroll
      for (int k = 0; k < C::kKeyTile / 16; ++k) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          std::uint32_t v[4];
          cuda::load_matrix_transposed(v, cuda::at_columns<C::kKeyTile>(v_at, n + c) +
                                              static_cast<std::uint32_t>(k * 16 * cuda::kPanelRowBytes));
#pragma unroll
          for (int b = 0; b < C::kRowBlocks; ++b) {
            cuda::multiply<Element>(sum[c][b][0], probability[b][k], v[0], v[1], k == 0);
            cuda::multiply<Element>(sum[c][b][1], probability[b][k], v[2], v[3], k == 0);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& o = state.o[b][2 * (n + c) + h][i];
              o = __fmaf_rn(o, scale[b][i / 2], sum[c][b][h][i]);
            }
          }
        }
      }
    }
  }

  const cuda::AttentionParams& p_;
  const Rows rows_;
  std::uint32_t q_tile_;
};

}  // namespace ringattn::sm80
