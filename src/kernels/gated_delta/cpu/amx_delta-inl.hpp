// SPDX-License-Identifier: Apache-2.0
// A chunk of the gated delta rule by AMX tiles, for bf16 (delta_tiles.hpp). The scheme is that of
// kernels/gated_delta/gated_delta.hpp; the arithmetic is a target of its own:
//   T       by substitution in fp32, four rows at a time, ascending in the column; a hi/lo pair, hi before lo
//   w       v − D(k · S), D the decays up to a row, with S rounded to bf16; rounded
//   u       T · w, rounded for o, and times the decays after its row for the state
//   o       scale · (D(q · S) + (decayed q · kᵀ) · u), with the decayed product rounded to bf16
//   state   fma(a(chunk), S, kᵀ · (decays after u's row · u))
// In KDA the rows of k and q have their decays already (amx_decayed-inl.hpp), and D and the decays after a row are 1.
// Each product is a sum of TDPBF16PS from zero, 32 terms at a time. Subnormals are zero. Tokens after the chunk's last
// are zeros, and a row has zeros for the tokens after it: they add a zero, whose sign is cleared. So a row does not
// depend on how many tokens follow.
#if defined(RINGATTN_KERNELS_GATED_DELTA_CPU_AMX_DELTA_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_GATED_DELTA_CPU_AMX_DELTA_INL_HPP_
#undef RINGATTN_KERNELS_GATED_DELTA_CPU_AMX_DELTA_INL_HPP_
#else
#define RINGATTN_KERNELS_GATED_DELTA_CPU_AMX_DELTA_INL_HPP_
#endif

#include <algorithm>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/gated_delta/cpu/delta_tiles.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "kernels/ssm/cpu/amx_decayed-inl.hpp"

#ifdef RINGATTN_HAVE_AMX_GEMM

// As in amx_pairs-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// 1 / sqrt(Σ x² + eps) of a row of bf16.
HWY_INLINE float inverse_norm(const std::byte* row, int dim) {
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int d = 0; d < dim; d += kTileDepth) {
    __m512 x[2];
    widen_dims(row + 2 * d, x);
    for (int half = 0; half < 2; ++half) sums[half] = _mm512_fmadd_ps(x[half], x[half], sums[half]);
  }
  return 1.0F / std::sqrt(_mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])) + kQkL2NormEps);
}

// Packs rows of k or q as a left factor.
HWY_INLINE void pack_delta_rows(const SsdRows& rows, int dim, int tokens, int next_tokens, bool normalized,
                                std::byte* tiles) {
  const int steps = dim / kTileDepth;
  const int end = (tokens + kSsdBlock - 1) / kSsdBlock * kSsdBlock;
  for (int i = 0; i < end; ++i) {
    if (i < next_tokens) prefetch_row(rows.at(i + kSsdRows), 2 * dim);
    const __m512 factor = _mm512_set1_ps(normalized && i < tokens ? inverse_norm(rows.at(i), dim) : 1.0F);
    for (int step = 0; step < steps; ++step) {
      __m512i values = _mm512_setzero_si512();
      if (i < tokens) {
        const std::byte* const source = rows.at(i) + step * kTileRowBytes;
        values = _mm512_loadu_si512(source);
        if (normalized) {
          __m512 wide[2];
          widen_dims(source, wide);
          values = round_to_bf16(_mm512_mul_ps(wide[0], factor), _mm512_mul_ps(wide[1], factor));
        }
      }
      _mm512_store_si512(left_row(tiles, i, step, steps), values);
    }
  }
}

inline void load_delta_keys(const DeltaTiles& tiles, const SsdRows& k, const SsdRows& q, int tokens, int next_tokens,
                            bool normalized) {
  const FlushSubnormals flush;
  const DecayedTiles& keys = tiles.keys;
  const int steps = keys.dim / kTileDepth;
  pack_delta_rows(k, keys.dim, tokens, next_tokens, normalized, keys.k_rows);
  if (q.data != nullptr) pack_delta_rows(q, keys.dim, tokens, next_tokens, normalized, keys.q_rows);
  const int blocks = (tokens + kSsdBlock - 1) / kSsdBlock;
  for (int block = 0; block < blocks; ++block) {
    for (int step = 0; step < steps; ++step) {
      const std::byte* const left = left_row(keys.k_rows, block * kSsdBlock, step, steps);
      __m512i pairs[2][kTileRows];
      for (int half = 0; half < 2; ++half) {
        __m512i rows[kTileRows];
        for (int i = 0; i < kTileRows; ++i) {
          rows[i] = _mm512_load_si512(left + static_cast<std::size_t>(half) * kTileBytes + i * kTileRowBytes);
        }
        transpose_pairs(rows,
                        tiles.k_columns + static_cast<std::size_t>((2 * block + half) * steps + step) * kTileBytes);
        for (int i = 0; i < kTileRows; i += 2) {
          const RowPairs both = interleave_rows(rows[i], rows[i + 1]);
          pairs[0][half * kTileRows / 2 + i / 2] = both.first;
          pairs[1][half * kTileRows / 2 + i / 2] = both.second;
        }
      }
      store_transposed(pairs, step, block, keys.k_transposed);
    }
  }
  configure_tiles(TileConfig{});
  const std::size_t block_bytes = static_cast<std::size_t>(steps) * 2 * kTileBytes;
  for (int block = 0; block < blocks; ++block) {
    for (int column = 0; column <= block; ++column) {
      const SsdFactor right = right_factor(tiles.k_columns + static_cast<std::size_t>(column) * block_bytes, steps);
      const std::ptrdiff_t at = (std::ptrdiff_t{block} * kSsdRows + column) * kSsdBlock;
      zero_block();
      add_block(left_factor(keys.k_rows + static_cast<std::size_t>(block) * block_bytes), right, steps);
      store_block(keys.kk + at, kSsdRows);
      if (q.data == nullptr) continue;
      zero_block();
      add_block(left_factor(keys.q_rows + static_cast<std::size_t>(block) * block_bytes), right, steps);
      store_block(keys.qk + at, kSsdRows);
    }
  }
  release_tiles();
}

// Widens a row of k or q; null: zeros.
HWY_INLINE void widen_delta_row(const std::byte* row, int dim, bool normalized, float* target) {
  const __m512 factor = _mm512_set1_ps(normalized && row != nullptr ? inverse_norm(row, dim) : 1.0F);
  for (int d = 0; d < dim; d += kTileDepth) {
    __m512 wide[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (row != nullptr) widen_dims(row + 2 * d, wide);
    for (int half = 0; half < 2; ++half) {
      _mm512_store_ps(target + d + half * kTileColumns, _mm512_mul_ps(wide[half], factor));
    }
  }
}

inline void load_decayed_delta_keys(const DeltaTiles& tiles, const SsdRows& k, const SsdRows& q,
                                    const SsdRows& log_decays, int tokens, int next_tokens, bool normalized) {
  const FlushSubnormals flush;
  DecayedTiles keys = tiles.keys;
  if (q.data == nullptr) keys.q = nullptr;
  for (int i = 0; i < kSsdRows; ++i) {
    const std::ptrdiff_t at = std::ptrdiff_t{i} * keys.dim;
    if (i < next_tokens) {
      prefetch_row(k.at(i + kSsdRows), 2 * keys.dim);
      if (q.data != nullptr) prefetch_row(q.at(i + kSsdRows), 2 * keys.dim);
      prefetch_row(log_decays.at(i + kSsdRows), 4 * keys.dim);
    }
    widen_delta_row(i < tokens ? k.at(i) : nullptr, keys.dim, normalized, keys.k + at);
    if (keys.q != nullptr) widen_delta_row(i < tokens ? q.at(i) : nullptr, keys.dim, normalized, keys.q + at);
    clamp_log_decays(i < tokens ? reinterpret_cast<const float*>(log_decays.at(i)) : nullptr, keys.dim,
                     keys.decays + at);
  }
  configure_tiles(TileConfig{});
  decay_keys(keys, tokens);
  release_tiles();
}

// 32 elements of bf16 in fp32.
HWY_INLINE void widen_halves(__m512i rounded, RowDims& wide) {
  const auto widen = [](__m256i half)
                         HWY_ATTR { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); };
  wide = {widen(_mm512_castsi512_si256(rounded)), widen(_mm512_extracti64x4_epi64(rounded, 1))};
}

// Four rows of T from row `row` of 16 · kBlock … on.
template <int kBlock>
HWY_INLINE void invert_delta_rows(const DeltaTiles& tiles, const float* beta, int row) {
  constexpr int kRows = 4;
  const float* const a = tiles.a + std::ptrdiff_t{row} * kSsdRows;
  __m512 sums[kRows][kBlock + 1];
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kBlock; ++v) sums[r][v] = _mm512_setzero_ps();
    sums[r][kBlock] = _mm512_maskz_mov_ps(static_cast<__mmask16>(1U << (row + r) % kTileColumns), _mm512_set1_ps(1.0F));
  }
  const auto subtract = [&](int r, int j) HWY_ATTR {
    const __m512 factor = _mm512_set1_ps(a[r * kSsdRows + j]);
    RINGATTN_UNROLL
    for (int v = 0; v <= kBlock; ++v) {
      sums[r][v] =
          _mm512_fnmadd_ps(factor, _mm512_load_ps(tiles.inverse + j * kSsdRows + v * kTileColumns), sums[r][v]);
    }
  };
  for (int j = 0; j < row; ++j) {
    RINGATTN_UNROLL
    for (int r = 0; r < kRows; ++r) subtract(r, j);
  }
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    for (int j = row; j < row + r; ++j) subtract(r, j);
    const __m512 factor = _mm512_set1_ps(beta[row + r]);
    float* const target = tiles.inverse + std::ptrdiff_t{row + r} * kSsdRows;
    RINGATTN_UNROLL
    for (int v = 0; v <= kBlock; ++v) {
      sums[r][v] = _mm512_mul_ps(factor, sums[r][v]);
      _mm512_store_ps(target + v * kTileColumns, sums[r][v]);
    }
    for (int v = kBlock + 1; v < kSsdRows / kTileColumns; ++v) {
      _mm512_store_ps(target + v * kTileColumns, _mm512_setzero_ps());
    }
    for (int v = 0; v <= kBlock; v += 2) {
      const RowDims t{sums[r][v], v < kBlock ? sums[r][v + 1] : _mm512_setzero_ps()};
      const __m512i hi = round_dims(t);
      RowDims wide;
      widen_halves(hi, wide);
      const RowDims rest{_mm512_sub_ps(t.low, wide.low), _mm512_sub_ps(t.high, wide.high)};
      _mm512_store_si512(left_row(tiles.t, row + r, v / 2, kSsdSteps), hi);
      _mm512_store_si512(left_row(tiles.t_lo, row + r, v / 2, kSsdSteps), round_dims(rest));
    }
  }
}

template <int kBlock>
HWY_INLINE void invert_delta_block(const DeltaTiles& tiles, const float* beta) {
  for (int r = 0; r < kTileRows; r += 4) invert_delta_rows<kBlock>(tiles, beta, kBlock * kTileRows + r);
}

inline void solve_delta(const DeltaTiles& tiles, const DeltaTileHead& head) {
  const FlushSubnormals flush;
  const int end = (head.tokens + kSsdBlock - 1) / kSsdBlock * kSsdBlock;
  for (int i = 0; i < kSsdRows; i += kTileColumns) {
    __m512 until = _mm512_set1_ps(1.0F);
    __m512 after = until;
    if (head.sums != nullptr) {
      const __m512 sums = _mm512_loadu_ps(head.sums + i);
      until = amx_exp2(sums);
      after = amx_exp2(_mm512_sub_ps(_mm512_set1_ps(head.sums[head.tokens - 1]), sums));
    }
    _mm512_store_ps(tiles.row_decays + i, until);
    _mm512_store_ps(tiles.after_decays + i, after);
  }
  if (head.sums != nullptr) {
    const __m512 decay = amx_exp2(_mm512_set1_ps(head.sums[head.tokens - 1]));
    for (int d = 0; d < tiles.keys.dim; d += kTileColumns) _mm512_store_ps(tiles.keys.chunk_decays + d, decay);
  }
  for (int i = 0; i < end; ++i) {
    const __m512 sum = _mm512_set1_ps(head.sums == nullptr ? 0.0F : head.sums[i]);
    const int row = i < head.tokens ? i : -1;  // rows after the last token are zeros
    for (int j = 0; j <= i; j += kTileDepth) {
      __m512 weights[2];
      for (int half = 0; half < 2; ++half) {
        const int column = j + half * kTileColumns;
        const std::ptrdiff_t at = std::ptrdiff_t{i} * kSsdRows + column;
        const auto up_to = static_cast<__mmask16>((1U << std::clamp(row + 1 - column, 0, kTileColumns)) - 1U);
        const auto before = static_cast<__mmask16>((1U << std::clamp(row - column, 0, kTileColumns)) - 1U);
        const __m512 decay = head.sums == nullptr ? _mm512_set1_ps(1.0F)
                                                  : amx_exp2(_mm512_sub_ps(sum, _mm512_loadu_ps(head.sums + column)));
        _mm512_store_ps(tiles.a + at, _mm512_maskz_mul_ps(before, _mm512_load_ps(tiles.keys.kk + at), decay));
        weights[half] =
            head.outputs ? _mm512_maskz_mul_ps(up_to, _mm512_load_ps(tiles.keys.qk + at), decay) : _mm512_setzero_ps();
      }
      if (head.outputs) {
        _mm512_store_si512(left_row(tiles.weights, i, j / kTileDepth, kSsdSteps),
                           round_to_bf16(weights[0], weights[1]));
      }
    }
  }
  invert_delta_block<0>(tiles, head.beta);
  invert_delta_block<1>(tiles, head.beta);
  if (end == kSsdBlock) return;
  invert_delta_block<2>(tiles, head.beta);
  invert_delta_block<3>(tiles, head.beta);
}

inline void round_delta_state(const DeltaTiles& tiles, const float* state, int columns, std::byte* rounded) {
  round_state_columns(tiles.keys.dim, columns, state, rounded);
}

// Stores rows i and i + 1 of 32 columns, rounded, as a right factor of [2, 2 steps of tokens, tile].
HWY_INLINE void store_delta_pair(const RowDims& even, const RowDims& odd, int i, std::byte* tiles) {
  std::byte* const target =
      tiles + i / kTileDepth * static_cast<std::ptrdiff_t>(kTileBytes) + i % kTileDepth / 2 * kTileRowBytes;
  _mm512_store_si512(target, round_to_pairs(even.low, odd.low));
  _mm512_store_si512(target + kSsdSteps * kTileBytes, round_to_pairs(even.high, odd.high));
}

HWY_INLINE void make_delta_w(const DeltaTiles& tiles, const DeltaTileHead& head, int column, int first) {
  const auto row = [&](int i) HWY_ATTR {
    const RowDims product = load_dims(tiles.products + i * kSsdBlock);
    __m512 v[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (i < head.next_tokens && head.v.data != nullptr) {
      _mm_prefetch(head.v.at(i + kSsdRows) + 2 * column, _MM_HINT_T1);
      if (head.outputs) _mm_prefetch(head.o + (i + kSsdRows) * head.o_stride + 2 * column, _MM_HINT_T1);
    }
    if (i < head.tokens && head.v.data != nullptr) widen_dims(head.v.at(i) + 2 * column, v);
    const __m512 decay = _mm512_set1_ps(tiles.row_decays[i]);
    return RowDims{_mm512_fnmadd_ps(decay, product.low, v[0]), _mm512_fnmadd_ps(decay, product.high, v[1])};
  };
  for (int i = first; i < first + kSsdBlock; i += 2) store_delta_pair(row(i), row(i + 1), i, tiles.w);
}

// T · w of 32 rows.
HWY_INLINE void multiply_inverse(const DeltaTiles& tiles, const SsdFactor& w, int block) {
  const std::size_t at = static_cast<std::size_t>(block * kSsdSteps) * 2 * kTileBytes;
  zero_block();
  add_block(left_factor(tiles.t + at), w, block + 1);
  add_block(left_factor(tiles.t_lo + at), w, block + 1);
  store_block(tiles.products + block * kSsdBlock * kSsdBlock, kSsdBlock);
}

HWY_INLINE void make_delta_u(const DeltaTiles& tiles, const DeltaTileHead& head, int first) {
  for (int i = first; i < first + kSsdBlock; i += 2) {
    RowDims u[2];
    RowDims scaled[2];
    for (int r = 0; r < 2; ++r) {
      const RowDims product = load_dims(tiles.products + (i + r) * kSsdBlock);
      u[r] = {_mm512_add_ps(product.low, _mm512_setzero_ps()), _mm512_add_ps(product.high, _mm512_setzero_ps())};
      const __m512 after = _mm512_set1_ps(tiles.after_decays[i + r]);
      scaled[r] = multiply_dims(u[r], {after, after});
    }
    if (head.outputs) store_delta_pair(u[0], u[1], i, tiles.u);
    store_delta_pair(scaled[0], scaled[1], i, tiles.scaled_u);
  }
}

HWY_INLINE void write_delta_rows(const DeltaTiles& tiles, const DeltaTileHead& head, int column, int first) {
  const __m512 scale = _mm512_set1_ps(head.scale);
  for (int i = first; i < std::min(head.tokens, first + kSsdBlock); ++i) {
    const float* const inter = tiles.products + i * kSsdBlock;
    const float* const intra = inter + kSsdRows * kSsdBlock;
    const __m512 decay = _mm512_set1_ps(tiles.row_decays[i]);
    __m512 o[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(intra + half * kTileColumns), _mm512_setzero_ps());
      o[half] = _mm512_mul_ps(scale, _mm512_fmadd_ps(decay, _mm512_load_ps(inter + half * kTileColumns), sum));
    }
    _mm512_storeu_si512(head.o + i * head.o_stride + 2 * column, round_to_bf16(o[0], o[1]));
  }
}

inline void advance_delta(const DeltaTiles& tiles, const DeltaTileHead& head, float* state, int columns,
                          std::byte* rounded) {
  const FlushSubnormals flush;
  const int steps = tiles.keys.dim / kTileDepth;
  const int blocks = (head.tokens + kSsdBlock - 1) / kSsdBlock;
  configure_tiles(TileConfig{});
  for (int column = 0; column < columns; column += kSsdBlock) {
    std::byte* const s_tiles = rounded + static_cast<std::size_t>(column / kTileColumns * steps) * kTileBytes;
    const SsdFactor s = right_factor(s_tiles, steps);
    for (int b = 0; b < blocks; ++b) multiply_row_block(tiles.keys.k_rows, s, steps, b, steps, tiles.products);
    for (int b = 0; b < blocks; ++b) make_delta_w(tiles, head, column, b * kSsdBlock);
    const SsdFactor w = right_factor(tiles.w, kSsdSteps);
    for (int b = 0; b < blocks; ++b) multiply_inverse(tiles, w, b);
    for (int b = 0; b < blocks; ++b) make_delta_u(tiles, head, b * kSsdBlock);
    if (head.outputs) {
      const SsdFactor u = right_factor(tiles.u, kSsdSteps);
      for (int b = 0; b < blocks; ++b) {
        multiply_row_block(tiles.keys.q_rows, s, steps, b, steps, tiles.products);
        multiply_row_block(tiles.weights, u, kSsdSteps, b, b + 1, tiles.products + kSsdRows * kSsdBlock);
      }
      for (int b = 0; b < blocks; ++b) write_delta_rows(tiles, head, column, b * kSsdBlock);
    }
    update_decayed_state<false>(tiles.keys, right_factor(tiles.scaled_u, kSsdSteps), blocks, tiles.products,
                                state + column, columns, s_tiles);
  }
  release_tiles();
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
