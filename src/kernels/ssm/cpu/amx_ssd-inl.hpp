// SPDX-License-Identifier: Apache-2.0
// A chunk of SSD by AMX tiles, for bf16 (ssd_tiles.hpp). The scheme is that of kernels/ssm/ssm.hpp; the arithmetic is a
// target of its own:
//   scores     C · Bᵀ
//   y          a(tokens up to i) · (C · S) + (intra-chunk scores) · x, with S and the intra-chunk scores rounded to
//              bf16; then D · x, gate and scale in fp32
//   state      fma(a(chunk), S, Bᵀ · (f · x)), f_j = a(tokens after j) · dt_j in fp32. f · x is rounded to bf16 for
//   rows
//              within the segment, and is a hi/lo pair for local and final states, hi before lo
// Each product is a sum of TDPBF16PS from zero, 32 terms at a time as in amx_gemm-inl.hpp. Subnormals are zero, in
// tiles and in vectors. Tokens after the chunk's last are zeros, and a row of y has zeros for the tokens after it: they
// add a zero, whose sign is cleared in y. So a row does not depend on how many tokens follow.
#if defined(RINGATTN_KERNELS_SSM_CPU_AMX_SSD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_SSM_CPU_AMX_SSD_INL_HPP_
#undef RINGATTN_KERNELS_SSM_CPU_AMX_SSD_INL_HPP_
#else
#define RINGATTN_KERNELS_SSM_CPU_AMX_SSD_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/common/cpu/amx_pairs-inl.hpp"
#include "kernels/common/cpu/amx_tiles.hpp"
#include "kernels/gemm/cpu/amx_gemm-inl.hpp"
#include "kernels/ssm/cpu/ssd_tiles.hpp"
#include "kernels/ssm/ssm.hpp"

#ifdef RINGATTN_HAVE_AMX_GEMM

// As in amx_pairs-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

inline constexpr int kSsdBlock = 2 * kTileRows;  // rows and columns of a product, and terms of a step
inline constexpr int kSsdRows = static_cast<int>(kChunkTokens);
inline constexpr int kSsdSteps = kSsdRows / kTileDepth;

// Tiles of a factor of a product: those of 16 rows (left) or columns (right) and of 32 terms.
struct SsdFactor {
  const std::byte* tiles = nullptr;
  std::size_t half_stride = 0;  // bytes to the other 16 rows or columns
  std::size_t step_stride = 0;  // bytes to the next 32 terms
};

HWY_INLINE SsdFactor left_factor(const std::byte* tiles) { return {tiles, kTileBytes, 2 * kTileBytes}; }
HWY_INLINE SsdFactor right_factor(const std::byte* tiles, int steps) {
  return {tiles, static_cast<std::size_t>(steps) * kTileBytes, kTileBytes};
}

HWY_INLINE void zero_block() {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
}

HWY_INLINE void add_block(SsdFactor left, SsdFactor right, int steps) {
  for (int step = 0; step < steps; ++step) {
    load_tile<4>(left.tiles, kTileRowBytes);
    load_tile<6>(right.tiles, kTileRowBytes);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(right.tiles + right.half_stride, kTileRowBytes);
    multiply_tiles<1, 4, 7>();
    load_tile<5>(left.tiles + left.half_stride, kTileRowBytes);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
    left.tiles += left.step_stride;
    right.tiles += right.step_stride;
  }
}

// [kSsdBlock, kSsdBlock], rows `stride` floats apart.
HWY_INLINE void store_block(float* block, std::size_t stride) {
  store_tile<0>(block, stride * sizeof(float));
  store_tile<1>(block + kTileColumns, stride * sizeof(float));
  store_tile<2>(block + kTileRows * stride, stride * sizeof(float));
  store_tile<3>(block + kTileRows * stride + kTileColumns, stride * sizeof(float));
}

// The even and the odd elements of pairs, and pairs of rounded elements.
HWY_INLINE __m512 even_elements(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
HWY_INLINE __m512 odd_elements(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
}
HWY_INLINE __m512i round_to_pairs(__m512 even, __m512 odd) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), round_to_bf16(even, odd));
}

inline void load_ssd_group(const SsdTiles& tiles, const SsdRows& b, const SsdRows& c, int tokens) {
  const int steps = tiles.state_dim / kTileDepth;
  const std::int64_t bytes = std::int64_t{2} * tiles.state_dim;
  for (int block = 0; block < steps; ++block) {
    pack_amx_columns_transposed(b.data + block * kTileRowBytes, b.stride, kSsdBlock, tokens,
                                tiles.b + block * kSsdSteps * 2 * kTileBytes);
  }
  if (c.data == nullptr) return;
  const std::size_t c_block = static_cast<std::size_t>(steps) * 2 * kTileBytes;
  const std::size_t b_tile = static_cast<std::size_t>(steps) * kTileBytes;
  configure_tiles(TileConfig{});
  for (int first = 0; first < tokens; first += kSsdBlock) {
    const std::size_t block = static_cast<std::size_t>(first / kSsdBlock);
    pack_amx_columns(c.at(first), c.stride, std::min(kSsdBlock, tokens - first), bytes, tiles.c + block * c_block);
    for (int half = 0; half < 2; ++half) {
      const std::byte* rows[kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        const int token = first + half * kTileRows + i;
        rows[i] = token < tokens ? b.at(token) : nullptr;
      }
      pack_amx_rows(rows, bytes, tiles.b_pairs + (2 * block + static_cast<std::size_t>(half)) * b_tile);
    }
    for (std::size_t column = 0; column <= block; ++column) {
      zero_block();
      add_block(left_factor(tiles.c + block * c_block), right_factor(tiles.b_pairs + 2 * column * b_tile, steps),
                steps);
      store_block(tiles.scores + (block * kSsdRows + column) * kSsdBlock, kSsdRows);
    }
  }
  release_tiles();
}

// Rows of a head lie a page apart, so each costs a TLB miss.
HWY_INLINE void prefetch_ssd_rows(const SsdTiles& tiles, const SsdTileHead& head, int token) {
  if (token >= head.next_tokens) return;
  for (int dim = 0; dim < tiles.head_dim; dim += kSsdBlock) {
    _mm_prefetch(head.x.at(token + kSsdRows) + 2 * dim, _MM_HINT_T1);
    if (head.z.data != nullptr) _mm_prefetch(head.z.at(token + kSsdRows) + 2 * dim, _MM_HINT_T1);
    if (head.y != nullptr) _mm_prefetch(head.y + (token + kSsdRows) * head.y_stride + 2 * dim, _MM_HINT_T1);
  }
}

// f · x in pairs of tokens, as a hi/lo pair or rounded; then x, too, for rows of y.
template <bool kHiLo>
HWY_INLINE void load_ssd_x(const SsdTiles& tiles, const SsdTileHead& head) {
  alignas(64) float factors[kSsdRows];
  const __m512 last = _mm512_set1_ps(head.sums[head.tokens - 1]);
  for (int j = 0; j < kSsdRows; j += kTileColumns) {
    const __m512 decay = amx_exp2(_mm512_sub_ps(last, _mm512_loadu_ps(head.sums + j)));
    const auto exists = static_cast<__mmask16>((1U << std::clamp(head.tokens - j, 0, kTileColumns)) - 1U);
    _mm512_store_ps(factors + j, _mm512_maskz_mul_ps(exists, decay, _mm512_loadu_ps(head.dt + j)));
  }
  const std::size_t lo = static_cast<std::size_t>(tiles.head_dim) * 2 * kSsdRows;
  constexpr std::size_t kColumnBytes = kSsdSteps * kTileBytes;  // of 16 dims
  const int end = (head.tokens + kTileDepth - 1) / kTileDepth * kTileDepth;
  for (int j = 0; j < end; j += 2) {
    prefetch_ssd_rows(tiles, head, j);
    prefetch_ssd_rows(tiles, head, j + 1);
    const std::byte* const even = j < head.tokens ? head.x.at(j) : nullptr;
    const std::byte* const odd = j + 1 < head.tokens ? head.x.at(j + 1) : nullptr;
    const __m512 even_factor = _mm512_set1_ps(factors[j]);
    const __m512 odd_factor = _mm512_set1_ps(factors[j + 1]);
    std::size_t at = static_cast<std::size_t>(j) * (kTileRowBytes / 2);
    const auto store = [&](__m512i pairs) HWY_ATTR {
      const __m512 first = _mm512_mul_ps(even_elements(pairs), even_factor);
      const __m512 second = _mm512_mul_ps(odd_elements(pairs), odd_factor);
      const __m512i rounded = round_to_pairs(first, second);
      _mm512_store_si512(tiles.scaled_x + at, rounded);
      if constexpr (kHiLo) {
        const __m512 first_lo = _mm512_sub_ps(first, even_elements(rounded));
        const __m512 second_lo = _mm512_sub_ps(second, odd_elements(rounded));
        _mm512_store_si512(tiles.scaled_x + lo + at, round_to_pairs(first_lo, second_lo));
      } else {
        _mm512_store_si512(tiles.x + at, pairs);
      }
      at += kColumnBytes;
    };
    for (int dim = 0; dim < tiles.head_dim; dim += kSsdBlock) {
      const RowPairs pairs =
          interleave_rows(load_pairs(even, dim, tiles.head_dim), load_pairs(odd, dim, tiles.head_dim));
      store(pairs.first);
      store(pairs.second);
    }
  }
}

// Rounds two rows of 32 dims of a state.
HWY_INLINE void round_state_rows(const __m512 (&even)[2], const __m512 (&odd)[2], int steps, std::byte* target) {
  _mm512_store_si512(target, round_to_pairs(even[0], odd[0]));
  _mm512_store_si512(target + static_cast<std::size_t>(steps) * kTileBytes, round_to_pairs(even[1], odd[1]));
}

// kHiLo: with hi/lo pairs of f · x and without a rounded copy.
template <bool kHiLo>
HWY_INLINE void update_ssd_state(const SsdTiles& tiles, const SsdTileHead& head, float* state, std::byte* rounded) {
  const __m512 decay = amx_exp2(_mm512_set1_ps(head.sums[head.tokens - 1]));
  const int token_steps = (head.tokens + kTileDepth - 1) / kTileDepth;
  const int state_steps = tiles.state_dim / kTileDepth;
  const std::size_t lo = static_cast<std::size_t>(tiles.head_dim) * 2 * kSsdRows;
  for (int n = 0; n < state_steps; ++n) {
    const SsdFactor b = left_factor(tiles.b + static_cast<std::size_t>(n) * kSsdSteps * 2 * kTileBytes);
    for (int dim = 0; dim < tiles.head_dim; dim += kSsdBlock) {
      const std::byte* const x = tiles.scaled_x + static_cast<std::size_t>(dim) * 2 * kSsdRows;
      float* const block = tiles.products + (dim / kSsdBlock % 2) * kSsdBlock * kSsdBlock;
      zero_block();
      add_block(b, right_factor(x, kSsdSteps), token_steps);
      if constexpr (kHiLo) add_block(b, right_factor(x + lo, kSsdSteps), token_steps);
      store_block(block, kSsdBlock);
      float* row = state + static_cast<std::size_t>(n * kTileDepth) * static_cast<std::size_t>(tiles.head_dim) +
                   static_cast<std::size_t>(dim);
      for (int i = 0; i < kTileDepth; i += 2) {
        __m512 next[2][2];
        for (int r = 0; r < 2; ++r, row += tiles.head_dim) {
          for (int half = 0; half < 2; ++half) {
            const __m512 added = _mm512_load_ps(block + (i + r) * kSsdBlock + half * kTileColumns);
            next[r][half] = _mm512_fmadd_ps(decay, _mm512_loadu_ps(row + half * kTileColumns), added);
            _mm512_storeu_ps(row + half * kTileColumns, next[r][half]);
          }
        }
        if constexpr (!kHiLo) {
          std::byte* const tile = rounded + static_cast<std::size_t>(dim / kTileColumns * state_steps + n) * kTileBytes;
          round_state_rows(next[0], next[1], state_steps, tile + i / 2 * kTileRowBytes);
        }
      }
    }
  }
}

inline void accumulate_ssd(const SsdTiles& tiles, const SsdTileHead& head, float* state) {
  const FlushSubnormals flush;
  configure_tiles(TileConfig{});
  load_ssd_x<true>(tiles, head);
  update_ssd_state<true>(tiles, head, state, nullptr);
  release_tiles();
}

// A state [state_dim, columns] as [columns / 16, steps of state_dim, tile].
inline void round_state_columns(int state_dim, int columns, const float* state, std::byte* rounded) {
  const int steps = state_dim / kTileDepth;
  for (int n = 0; n < state_dim; n += 2) {
    const float* const even = state + static_cast<std::ptrdiff_t>(n) * columns;
    const float* const odd = even + columns;
    for (int column = 0; column < columns; column += kSsdBlock) {
      std::byte* const tile =
          rounded + static_cast<std::size_t>(column / kTileColumns * steps + n / kTileDepth) * kTileBytes;
      round_state_rows({_mm512_loadu_ps(even + column), _mm512_loadu_ps(even + column + kTileColumns)},
                       {_mm512_loadu_ps(odd + column), _mm512_loadu_ps(odd + column + kTileColumns)}, steps,
                       tile + n % kTileDepth / 2 * kTileRowBytes);
    }
  }
}

inline void round_ssd_state(const SsdTiles& tiles, const float* state, std::byte* rounded) {
  round_state_columns(tiles.state_dim, tiles.head_dim, state, rounded);
}

// Intra-chunk scores: scores[i, j] · a(tokens j + 1 … i) · dt[j], zero for j > i, rounded to bf16.
HWY_INLINE void weigh_ssd_scores(const SsdTiles& tiles, const SsdTileHead& head) {
  for (int i = 0; i < head.tokens; ++i) {
    const __m512 sum = _mm512_set1_ps(head.sums[i]);
    const auto weight = [&](int j) HWY_ATTR {
      const auto before = static_cast<__mmask16>((1U << std::clamp(i + 1 - j, 0, kTileColumns)) - 1U);
      const __m512 decay = amx_exp2(_mm512_sub_ps(sum, _mm512_loadu_ps(head.sums + j)));
      const __m512 decayed = _mm512_mul_ps(_mm512_load_ps(tiles.scores + i * kSsdRows + j), decay);
      return _mm512_maskz_mul_ps(before, decayed, _mm512_loadu_ps(head.dt + j));
    };
    const int tile = i / kSsdBlock * kSsdSteps * 2 + i % kSsdBlock / kTileRows;
    std::byte* const row =
        tiles.weights + tile * static_cast<std::ptrdiff_t>(kTileBytes) + i % kTileRows * kTileRowBytes;
    for (int j = 0; j <= i; j += kTileDepth) {
      _mm512_store_si512(row + j / kTileDepth * 2 * kTileBytes, round_to_bf16(weight(j), weight(j + kTileColumns)));
    }
  }
}

// z / (1 + exp(−z)): within 2 ulp, and NaN for −∞.
HWY_INLINE __m512 amx_silu(__m512 z) {
  const __m512 power = amx_exp2(_mm512_mul_ps(z, _mm512_set1_ps(-1.44269504F)));
  const __m512 divisor = _mm512_add_ps(power, _mm512_set1_ps(1.0F));
  const __m512 estimate = _mm512_rcp14_ps(divisor);
  const __m512 error = _mm512_fnmadd_ps(divisor, estimate, _mm512_set1_ps(1.0F));
  // ∞ has the inverse 0, and an error of ∞ · 0.
  const __mmask16 finite =
      _mm512_cmp_ps_mask(divisor, _mm512_set1_ps(std::numeric_limits<float>::infinity()), _CMP_NEQ_UQ);
  return _mm512_mul_ps(z, _mm512_mask_fmadd_ps(estimate, finite, error, estimate));
}

// 32 dims of a row of bf16.
HWY_INLINE void widen_dims(const std::byte* row, __m512 (&values)[2]) {
  for (int half = 0; half < 2; ++half) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + half * kTileRowBytes / 2)));
    values[half] = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
}

// Rows [first, first + 32) and dims [dim, dim + 32) of y, from the products C · S and (intra-chunk scores) · x.
HWY_INLINE void write_ssd_rows(const SsdTiles& tiles, const SsdTileHead& head, const float* decays, int first,
                               int dim) {
  const int rows = std::min(kSsdBlock, head.tokens - first);
  for (int i = 0; i < rows; ++i) {
    const int token = first + i;
    const __m512 decay = _mm512_set1_ps(decays[token]);
    __m512 y[2];
    for (int half = 0; half < 2; ++half) {
      const float* const inter = tiles.products + i * kSsdBlock + half * kTileColumns;
      const __m512 intra = _mm512_load_ps(inter + kSsdBlock * kSsdBlock);
      y[half] = _mm512_fmadd_ps(decay, _mm512_load_ps(inter), _mm512_add_ps(intra, _mm512_setzero_ps()));
    }
    if (head.d != nullptr) {
      __m512 x[2];
      widen_dims(head.x.at(token) + 2 * dim, x);
      for (int half = 0; half < 2; ++half) y[half] = _mm512_fmadd_ps(_mm512_set1_ps(*head.d), x[half], y[half]);
    }
    if (head.z.data != nullptr) {
      __m512 z[2];
      widen_dims(head.z.at(token) + 2 * dim, z);
      for (int half = 0; half < 2; ++half) y[half] = _mm512_mul_ps(y[half], amx_silu(z[half]));
    }
    for (int half = 0; half < 2; ++half) y[half] = _mm512_mul_ps(y[half], _mm512_set1_ps(head.scale));
    _mm512_storeu_si512(head.y + token * head.y_stride + 2 * dim, round_to_bf16(y[0], y[1]));
  }
}

inline void finish_ssd(const SsdTiles& tiles, const SsdTileHead& head, float* state, std::byte* rounded) {
  const FlushSubnormals flush;
  alignas(64) float decays[kSsdRows];
  for (int i = 0; i < kSsdRows; i += kTileColumns)
    _mm512_store_ps(decays + i, amx_exp2(_mm512_loadu_ps(head.sums + i)));
  configure_tiles(TileConfig{});
  load_ssd_x<false>(tiles, head);
  weigh_ssd_scores(tiles, head);
  const int steps = tiles.state_dim / kTileDepth;
  for (int first = 0; first < head.tokens; first += kSsdBlock) {
    const int block = first / kSsdBlock;
    const SsdFactor c = left_factor(tiles.c + static_cast<std::size_t>(block * steps) * 2 * kTileBytes);
    const SsdFactor weights = left_factor(tiles.weights + static_cast<std::size_t>(block) * kSsdSteps * 2 * kTileBytes);
    for (int dim = 0; dim < tiles.head_dim; dim += kSsdBlock) {
      const auto column = static_cast<std::size_t>(dim / kTileColumns);
      zero_block();
      add_block(c, right_factor(rounded + column * static_cast<std::size_t>(steps) * kTileBytes, steps), steps);
      store_block(tiles.products, kSsdBlock);
      zero_block();
      add_block(weights, right_factor(tiles.x + column * kSsdSteps * kTileBytes, kSsdSteps), block + 1);
      store_block(tiles.products + kSsdBlock * kSsdBlock, kSsdBlock);
      write_ssd_rows(tiles, head, decays, first, dim);
    }
  }
  update_ssd_state<false>(tiles, head, state, rounded);
  release_tiles();
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
