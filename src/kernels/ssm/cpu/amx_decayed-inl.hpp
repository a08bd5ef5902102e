// SPDX-License-Identifier: Apache-2.0
// Decayed keys and queries of a chunk by AMX tiles, with a decay per key dim (decayed_tiles.hpp). A chunk has
// sub-chunks of 16 tokens. With α_t = exp2 of a token's log-decays, all decays are products of α, so none of them
// overflows, and one exponential is computed for a token and dim:
//   below the diagonal  (q_i · Π α of its sub-chunk up to i) · (k_j · Π α of the tokens after j before that sub-chunk),
//                       both factors rounded to bf16
//   on the diagonal     Σ_d q_i · (k_j · α_{j + 1} · … · α_i) in fp32, d ascending, lanes being j
// Factors of products with the state are rounded once, too. Subnormals are zero.
#if defined(RINGATTN_KERNELS_SSM_CPU_AMX_DECAYED_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_SSM_CPU_AMX_DECAYED_INL_HPP_
#undef RINGATTN_KERNELS_SSM_CPU_AMX_DECAYED_INL_HPP_
#else
#define RINGATTN_KERNELS_SSM_CPU_AMX_DECAYED_INL_HPP_
#endif

#include "hwy/highway.h"
#include "kernels/ssm/cpu/amx_ssd-inl.hpp"
#include "kernels/ssm/cpu/decayed_tiles.hpp"

#ifdef RINGATTN_HAVE_AMX_GEMM

// As in amx_pairs-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

inline constexpr int kDecaySub = kTileRows;  // tokens of a sub-chunk
inline constexpr int kDecaySubs = kSsdRows / kDecaySub;

// 32 dims of a row.
struct RowDims {
  __m512 low;
  __m512 high;
};
HWY_INLINE RowDims load_dims(const float* row) { return {_mm512_loadu_ps(row), _mm512_loadu_ps(row + kTileColumns)}; }
HWY_INLINE void store_dims(const RowDims& dims, float* row) {
  _mm512_storeu_ps(row, dims.low);
  _mm512_storeu_ps(row + kTileColumns, dims.high);
}
HWY_INLINE RowDims multiply_dims(const RowDims& a, const RowDims& b) {
  return {_mm512_mul_ps(a.low, b.low), _mm512_mul_ps(a.high, b.high)};
}
HWY_INLINE __m512i round_dims(const RowDims& dims) { return round_to_bf16(dims.low, dims.high); }
HWY_INLINE RowDims ones() { return {_mm512_set1_ps(1.0F), _mm512_set1_ps(1.0F)}; }

// The row of a left factor [blocks of 32 rows, steps, 2, tile].
HWY_INLINE std::byte* left_row(std::byte* tiles, int row, int step, int steps) {
  const int tile = (row / kSsdBlock * steps + step) * 2 + row % kSsdBlock / kTileRows;
  return tiles + static_cast<std::size_t>(tile) * kTileBytes + row % kTileRows * kTileRowBytes;
}

// Transposes pairs of tokens of 32 dims, [16 pairs] for dims 0 … 15 and for 16 … 31, to tiles of the left factor
// [steps of dims, 2 steps of tokens, 2, tile].
HWY_INLINE void store_transposed(const __m512i (&pairs)[2][kTileRows], int step, int token_step, std::byte* tiles) {
  std::byte* const target = tiles + static_cast<std::size_t>((step * kSsdSteps + token_step) * 2) * kTileBytes;
  transpose_pairs(pairs[0], target);
  transpose_pairs(pairs[1], target + kTileBytes);
}

// From a chunk's first token to its last: decays, near keys and queries, and rows decayed from the chunk's start.
// Returns the decays of sub-chunks.
HWY_INLINE void decay_forwards(const DecayedTiles& tiles, int step, RowDims (&subs)[kDecaySubs]) {
  const int steps = tiles.dim / kTileDepth;
  RowDims start = ones();
  for (int s = 0; s < kDecaySubs; ++s) {
    RowDims until = ones();
    for (int r = 0; r < kDecaySub; ++r) {
      const int token = s * kDecaySub + r;
      const std::ptrdiff_t at = std::ptrdiff_t{token} * tiles.dim + step * kTileDepth;
      const RowDims log = load_dims(tiles.decays + at);
      const RowDims decay{amx_exp2(log.low), amx_exp2(log.high)};
      store_dims(decay, tiles.decays + at);
      until = multiply_dims(until, decay);
      if (tiles.q == nullptr && tiles.kk == nullptr) continue;
      const std::size_t near_row = static_cast<std::size_t>(s * steps + step) * kTileBytes +
                                   static_cast<std::size_t>(r) * static_cast<std::size_t>(kTileRowBytes);
      if (tiles.kk != nullptr) {
        const RowDims k = multiply_dims(load_dims(tiles.k + at), until);
        _mm512_store_si512(tiles.near_k + near_row, round_dims(k));
        _mm512_store_si512(left_row(tiles.k_rows, token, step, steps), round_dims(multiply_dims(k, start)));
      }
      if (tiles.q != nullptr) {
        const RowDims q = multiply_dims(load_dims(tiles.q + at), until);
        _mm512_store_si512(tiles.near_q + near_row, round_dims(q));
        _mm512_store_si512(left_row(tiles.q_rows, token, step, steps), round_dims(multiply_dims(q, start)));
      }
    }
    subs[s] = until;
    start = multiply_dims(start, until);
  }
  store_dims(start, tiles.chunk_decays + step * kTileDepth);
}

// From the last token to the first: keys decayed to the ends of their sub-chunk and of the chunk.
template <bool kHiLo>
HWY_INLINE void decay_backwards(const DecayedTiles& tiles, int step, const RowDims (&subs)[kDecaySubs]) {
  RowDims end = ones();
  __m512i pairs[2][kTileRows];
  __m512i lo[2][kTileRows];
  for (int s = kDecaySubs - 1; s >= 0; --s) {
    RowDims after = ones();
    RowDims odd = ones();
    for (int r = kDecaySub - 1; r >= 0; --r) {
      const int token = s * kDecaySub + r;
      const std::ptrdiff_t at = std::ptrdiff_t{token} * tiles.dim + step * kTileDepth;
      const RowDims k = multiply_dims(load_dims(tiles.k + at), after);
      store_dims(k, tiles.scaled_k + at);
      after = multiply_dims(after, load_dims(tiles.decays + at));
      const RowDims even = multiply_dims(k, end);
      if (r % 2 == 0) {
        const int pair = token % kTileDepth / 2;
        const __m512i low = round_to_pairs(even.low, odd.low);
        const __m512i high = round_to_pairs(even.high, odd.high);
        pairs[0][pair] = low;
        pairs[1][pair] = high;
        if constexpr (kHiLo) {
          lo[0][pair] =
              round_to_pairs(_mm512_sub_ps(even.low, even_elements(low)), _mm512_sub_ps(odd.low, odd_elements(low)));
          lo[1][pair] = round_to_pairs(_mm512_sub_ps(even.high, even_elements(high)),
                                       _mm512_sub_ps(odd.high, odd_elements(high)));
        }
      }
      odd = even;
    }
    end = multiply_dims(end, subs[s]);
    if (s % 2 != 0) continue;
    store_transposed(pairs, step, s / 2, tiles.k_transposed);
    if constexpr (kHiLo) store_transposed(lo, step, s / 2, tiles.k_transposed_lo);
  }
}

// Keys of sub-chunk t, decayed up to sub-chunk s > t, as right factors. Pairs are ordered (1, 0), (2, 0), (2, 1), …
HWY_INLINE void pack_far_keys(const DecayedTiles& tiles, int step, const RowDims (&subs)[kDecaySubs]) {
  const int steps = tiles.dim / kTileDepth;
  for (int t = 0; t + 1 < kDecaySubs; ++t) {
    RowDims between = ones();
    for (int s = t + 1; s < kDecaySubs; ++s) {
      __m512i rows[kTileRows];
      for (int r = 0; r < kDecaySub; ++r) {
        const float* const k = tiles.scaled_k + std::ptrdiff_t{t * kDecaySub + r} * tiles.dim + step * kTileDepth;
        rows[r] = round_dims(multiply_dims(load_dims(k), between));
      }
      const int pair = s * (s - 1) / 2 + t;
      transpose_pairs(rows, tiles.far_k + static_cast<std::size_t>(pair * steps + step) * kTileBytes);
      between = multiply_dims(between, subs[s]);
    }
  }
}

// Scores of different sub-chunks.
HWY_INLINE void multiply_far_keys(const DecayedTiles& tiles, int subs) {
  const int steps = tiles.dim / kTileDepth;
  const std::size_t stride = static_cast<std::size_t>(steps) * kTileBytes;
  for (int s = 1; s < subs; ++s) {
    for (int t = 0; t < s; ++t) {
      const std::byte* far_k = tiles.far_k + static_cast<std::size_t>(s * (s - 1) / 2 + t) * stride;
      const std::byte* near_k = tiles.near_k + static_cast<std::size_t>(s) * stride;
      const std::byte* near_q = tiles.near_q + static_cast<std::size_t>(s) * stride;
      zero_tile<0>();
      zero_tile<1>();
      for (int step = 0; step < steps; ++step) {
        load_tile<6>(far_k, kTileRowBytes);
        if (tiles.kk != nullptr) {
          load_tile<4>(near_k, kTileRowBytes);
          multiply_tiles<0, 4, 6>();
        }
        if (tiles.q != nullptr) {
          load_tile<5>(near_q, kTileRowBytes);
          multiply_tiles<1, 5, 6>();
        }
        far_k += kTileBytes;
        near_k += kTileBytes;
        near_q += kTileBytes;
      }
      const std::ptrdiff_t at = std::ptrdiff_t{s * kDecaySub} * kSsdRows + t * kDecaySub;
      if (tiles.kk != nullptr) store_tile<0>(tiles.kk + at, kSsdRows * sizeof(float));
      if (tiles.q != nullptr) store_tile<1>(tiles.qk + at, kSsdRows * sizeof(float));
    }
  }
}

// Scores of eight rows of a sub-chunk, from row `begin` of it on. Lane j of a vector is its token j, whose keys are
// multiplied by the decays of one row after the other.
template <bool kKeys, bool kQueries>
HWY_INLINE void multiply_near_rows(const DecayedTiles& tiles, int sub, int begin) {
  constexpr int kRows = kDecaySub / 2;
  __m512 kk[kRows];
  __m512 qk[kRows];
  for (int r = 0; r < kRows; ++r) kk[r] = qk[r] = _mm512_setzero_ps();
  const std::ptrdiff_t first = std::ptrdiff_t{sub * kDecaySub + begin} * tiles.dim;
  const float* decays = tiles.decays + first;
  const float* k = tiles.k + first;
  const float* q = kQueries ? tiles.q + first : nullptr;
  for (int d = 0; d < tiles.dim; ++d) {
    __m512 keys = _mm512_load_ps(tiles.diagonal + d * kTileColumns);
    RINGATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const std::ptrdiff_t at = std::ptrdiff_t{r} * tiles.dim + d;
      const auto before = static_cast<__mmask16>((1U << (begin + r)) - 1U);
      keys = _mm512_mask_mul_ps(keys, before, keys, _mm512_set1_ps(decays[at]));
      if constexpr (kKeys) kk[r] = _mm512_fmadd_ps(_mm512_set1_ps(k[at]), keys, kk[r]);
      if constexpr (kQueries) qk[r] = _mm512_fmadd_ps(_mm512_set1_ps(q[at]), keys, qk[r]);
    }
    if (begin == 0) _mm512_store_ps(tiles.diagonal + d * kTileColumns, keys);
  }
  for (int r = 0; r < kRows; ++r) {
    const std::ptrdiff_t at = std::ptrdiff_t{sub * kDecaySub + begin + r} * kSsdRows + sub * kDecaySub;
    const auto before = static_cast<__mmask16>((1U << (begin + r)) - 1U);
    const auto up_to = static_cast<__mmask16>((2U << (begin + r)) - 1U);
    if constexpr (kKeys) _mm512_store_ps(tiles.kk + at, _mm512_maskz_mov_ps(before, kk[r]));
    if constexpr (kQueries) _mm512_store_ps(tiles.qk + at, _mm512_maskz_mov_ps(up_to, qk[r]));
  }
}

HWY_INLINE void multiply_near_keys(const DecayedTiles& tiles, int subs) {
  for (int s = 0; s < subs; ++s) {
    for (int d = 0; d < tiles.dim; d += kTileColumns) {
      __m512i rows[kTileRows];
      for (int r = 0; r < kDecaySub; ++r) {
        rows[r] = _mm512_loadu_si512(tiles.k + std::ptrdiff_t{s * kDecaySub + r} * tiles.dim + d);
      }
      transpose_pairs(rows, reinterpret_cast<std::byte*>(tiles.diagonal + d * kTileColumns));
    }
    for (int begin = 0; begin < kDecaySub; begin += kDecaySub / 2) {
      if (tiles.q == nullptr) {
        multiply_near_rows<true, false>(tiles, s, begin);
      } else if (tiles.kk == nullptr) {
        multiply_near_rows<false, true>(tiles, s, begin);
      } else {
        multiply_near_rows<true, true>(tiles, s, begin);
      }
    }
  }
}

// Rows lie a page apart, so each costs a TLB miss.
HWY_INLINE void prefetch_row(const std::byte* row, int bytes) {
  for (int at = 0; at < bytes; at += 64) _mm_prefetch(row + at, _MM_HINT_T1);
}

// Log-decays to base 2, not below kMinLogDecay; NaN stays NaN. null: zeros.
HWY_INLINE void clamp_log_decays(const float* row, int dim, float* target) {
  for (int d = 0; d < dim; d += kTileColumns) {
    const __m512 log =
        row == nullptr ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_loadu_ps(row + d), _mm512_set1_ps(1.44269504F));
    // max returns its second operand if one is NaN.
    _mm512_storeu_ps(target + d, _mm512_max_ps(_mm512_set1_ps(-150.0F), log));
  }
}

// 32 rows, from 32 · `block` on, and 32 columns of a product with a left factor [blocks, steps, 2, tile].
HWY_INLINE void multiply_row_block(const std::byte* left, const SsdFactor& right, int steps, int block,
                                   int steps_of_block, float* products) {
  zero_block();
  add_block(left_factor(left + static_cast<std::size_t>(block * steps) * 2 * kTileBytes), right, steps_of_block);
  store_block(products + block * kSsdBlock * kSsdBlock, kSsdBlock);
}

// 32 columns of a state: fma(chunk_decays, S, k_transposed · right), and their rounded copy. kHiLo: k_transposed_lo is
// added, and there is no rounded copy.
template <bool kHiLo>
HWY_INLINE void update_decayed_state(const DecayedTiles& tiles, const SsdFactor& right, int token_steps,
                                     float* products, float* state, int columns, std::byte* rounded) {
  const int steps = tiles.dim / kTileDepth;
  for (int block = 0; block < steps; ++block) {
    const std::size_t at = static_cast<std::size_t>(block * kSsdSteps) * 2 * kTileBytes;
    zero_block();
    add_block(left_factor(tiles.k_transposed + at), right, token_steps);
    if constexpr (kHiLo) add_block(left_factor(tiles.k_transposed_lo + at), right, token_steps);
    store_block(products, kSsdBlock);
    for (int i = 0; i < kSsdBlock; i += 2) {
      RowDims next[2];
      for (int r = 0; r < 2; ++r) {
        const int d = block * kSsdBlock + i + r;
        float* const row = state + std::ptrdiff_t{d} * columns;
        const __m512 decay = _mm512_set1_ps(tiles.chunk_decays[d]);
        const RowDims before = load_dims(row);
        const RowDims added = load_dims(products + (i + r) * kSsdBlock);
        next[r] = {_mm512_fmadd_ps(decay, before.low, added.low), _mm512_fmadd_ps(decay, before.high, added.high)};
        store_dims(next[r], row);
      }
      if constexpr (!kHiLo) {
        round_state_rows({next[0].low, next[0].high}, {next[1].low, next[1].high}, steps,
                         rounded + static_cast<std::size_t>(block) * kTileBytes + i / 2 * kTileRowBytes);
      }
    }
  }
}

// All of DecayedTiles. Tiles have been configured.
inline void decay_keys(const DecayedTiles& tiles, int tokens) {
  const bool scores = tiles.q != nullptr || tiles.kk != nullptr;
  for (int step = 0; step < tiles.dim / kTileDepth; ++step) {
    RowDims subs[kDecaySubs];
    decay_forwards(tiles, step, subs);
    tiles.k_transposed_lo == nullptr ? decay_backwards<false>(tiles, step, subs)
                                     : decay_backwards<true>(tiles, step, subs);
    if (scores) pack_far_keys(tiles, step, subs);
  }
  if (!scores) return;
  const int subs = (tokens + kDecaySub - 1) / kDecaySub;
  multiply_far_keys(tiles, subs);
  multiply_near_keys(tiles, subs);
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
