// SPDX-License-Identifier: Apache-2.0
// A chunk of linear attention with a decay per key dim by AMX tiles, for bf16 (gla_tiles.hpp, amx_decayed-inl.hpp). The
// scheme is that of kernels/ssm/ssm.hpp; the arithmetic is a target of its own:
//   y          scale · (decayed q · S + (decayed q · kᵀ) · v), with S and the scores rounded to bf16
//   state      fma(a(chunk), S, decayed kᵀ · v). Decayed k is rounded to bf16 for rows within the segment, and is a
//              hi/lo pair for local and final states, hi before lo
// Each product is a sum of TDPBF16PS from zero, 32 terms at a time. Zeros, subnormals and tokens after the last one are
// treated as in amx_ssd-inl.hpp.
#if defined(RINGATTN_KERNELS_SSM_CPU_AMX_GLA_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_SSM_CPU_AMX_GLA_INL_HPP_
#undef RINGATTN_KERNELS_SSM_CPU_AMX_GLA_INL_HPP_
#else
#define RINGATTN_KERNELS_SSM_CPU_AMX_GLA_INL_HPP_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/ssm/cpu/amx_decayed-inl.hpp"
#include "kernels/ssm/cpu/gla_tiles.hpp"

#ifdef RINGATTN_HAVE_AMX_GEMM

// As in amx_pairs-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// A row of bf16 in fp32; null: zeros.
HWY_INLINE void widen_gla_row(const std::byte* row, int dim, float* target) {
  for (int d = 0; d < dim; d += kTileDepth) {
    __m512 wide[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (row != nullptr) widen_dims(row + 2 * d, wide);
    store_dims({wide[0], wide[1]}, target + d);
  }
}

// Loads k, log-decays and with keys.q also q, and adds sums of log-decays to `logs` if it is not null.
HWY_INLINE void load_gla_keys(const DecayedTiles& keys, const GlaTileHead& head, float* logs) {
  for (int i = 0; i < kSsdRows; ++i) {
    const std::ptrdiff_t at = std::ptrdiff_t{i} * keys.dim;
    if (i < head.next_tokens) {
      prefetch_row(head.k.at(i + kSsdRows), 2 * keys.dim);
      if (keys.q != nullptr) prefetch_row(head.q.at(i + kSsdRows), 2 * keys.dim);
      prefetch_row(head.log_decays.at(i + kSsdRows), 4 * keys.dim);
    }
    const bool exists = i < head.tokens;
    widen_gla_row(exists ? head.k.at(i) : nullptr, keys.dim, keys.k + at);
    if (keys.q != nullptr) widen_gla_row(exists ? head.q.at(i) : nullptr, keys.dim, keys.q + at);
    clamp_log_decays(exists ? reinterpret_cast<const float*>(head.log_decays.at(i)) : nullptr, keys.dim,
                     keys.decays + at);
  }
  for (int d = 0; logs != nullptr && d < keys.dim; d += kTileColumns) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < kSsdRows; ++i) {
      sum = _mm512_add_ps(sum, _mm512_loadu_ps(keys.decays + std::ptrdiff_t{i} * keys.dim + d));
    }
    _mm512_storeu_ps(logs + d, _mm512_add_ps(_mm512_loadu_ps(logs + d), sum));
  }
}

HWY_INLINE void load_gla_values(const GlaTiles& tiles, const GlaTileHead& head) {
  const int end = (head.tokens + kTileDepth - 1) / kTileDepth * kTileDepth;
  for (int j = 0; j < end; j += 2) {
    const std::byte* const even = j < head.tokens ? head.v.at(j) : nullptr;
    const std::byte* const odd = j + 1 < head.tokens ? head.v.at(j + 1) : nullptr;
    std::byte* target = tiles.v + static_cast<std::size_t>(j) * (kTileRowBytes / 2);
    for (int dim = 0; dim < tiles.head_dim; dim += kSsdBlock, target += 2 * kSsdSteps * kTileBytes) {
      for (int row = j; row < std::min(j + 2, head.next_tokens); ++row) {
        _mm_prefetch(head.v.at(row + kSsdRows) + 2 * dim, _MM_HINT_T1);
        if (head.y != nullptr) _mm_prefetch(head.y + (row + kSsdRows) * head.y_stride + 2 * dim, _MM_HINT_T1);
      }
      const RowPairs pairs =
          interleave_rows(load_pairs(even, dim, tiles.head_dim), load_pairs(odd, dim, tiles.head_dim));
      _mm512_store_si512(target, pairs.first);
      _mm512_store_si512(target + kSsdSteps * kTileBytes, pairs.second);
    }
  }
}

HWY_INLINE SsdFactor gla_values(const GlaTiles& tiles, int column) {
  return right_factor(tiles.v + static_cast<std::size_t>(column / kTileColumns * kSsdSteps) * kTileBytes, kSsdSteps);
}

inline void accumulate_gla(const GlaTiles& tiles, const GlaTileHead& head, float* state, float* logs) {
  const FlushSubnormals flush;
  DecayedTiles keys = tiles.keys;
  keys.q = nullptr;
  load_gla_keys(keys, head, logs);
  load_gla_values(tiles, head);
  configure_tiles(TileConfig{});
  decay_keys(keys, head.tokens);
  const int token_steps = (head.tokens + kTileDepth - 1) / kTileDepth;
  for (int column = 0; column < tiles.head_dim; column += kSsdBlock) {
    update_decayed_state<true>(keys, gla_values(tiles, column), token_steps, tiles.products, state + column,
                               tiles.head_dim, nullptr);
  }
  release_tiles();
}

inline void round_gla_state(const GlaTiles& tiles, const float* state, std::byte* rounded) {
  round_state_columns(tiles.keys.dim, tiles.head_dim, state, rounded);
}

HWY_INLINE void round_gla_scores(const GlaTiles& tiles, int tokens) {
  const int end = (tokens + kSsdBlock - 1) / kSsdBlock * kSsdBlock;
  for (int i = 0; i < end; ++i) {
    const int last = i < tokens ? i : -1;  // rows after the last token are zeros
    for (int j = 0; j <= i; j += kTileDepth) {
      const auto scores = [&](int column) HWY_ATTR {
        const auto up_to = static_cast<__mmask16>((1U << std::clamp(last + 1 - column, 0, kTileColumns)) - 1U);
        return _mm512_maskz_loadu_ps(up_to, tiles.keys.qk + i * kSsdRows + column);
      };
      _mm512_store_si512(left_row(tiles.weights, i, j / kTileDepth, kSsdSteps),
                         round_to_bf16(scores(j), scores(j + kTileColumns)));
    }
  }
}

HWY_INLINE void write_gla_rows(const GlaTiles& tiles, const GlaTileHead& head, int column) {
  const __m512 scale = _mm512_set1_ps(head.scale);
  for (int i = 0; i < head.tokens; ++i) {
    const RowDims inter = load_dims(tiles.products + i * kSsdBlock);
    const RowDims intra = load_dims(tiles.products + (kSsdRows + i) * kSsdBlock);
    const auto row = [&](__m512 a, __m512 b) HWY_ATTR {
      return _mm512_mul_ps(scale, _mm512_add_ps(a, _mm512_add_ps(b, _mm512_setzero_ps())));
    };
    _mm512_storeu_si512(head.y + i * head.y_stride + 2 * column,
                        round_to_bf16(row(inter.low, intra.low), row(inter.high, intra.high)));
  }
}

inline void finish_gla(const GlaTiles& tiles, const GlaTileHead& head, float* state, std::byte* rounded) {
  const FlushSubnormals flush;
  DecayedTiles keys = tiles.keys;
  keys.k_transposed_lo = nullptr;
  load_gla_keys(keys, head, nullptr);
  load_gla_values(tiles, head);
  configure_tiles(TileConfig{});
  decay_keys(keys, head.tokens);
  round_gla_scores(tiles, head.tokens);
  const int steps = keys.dim / kTileDepth;
  const int blocks = (head.tokens + kSsdBlock - 1) / kSsdBlock;
  for (int column = 0; column < tiles.head_dim; column += kSsdBlock) {
    std::byte* const s_tiles = rounded + static_cast<std::size_t>(column / kTileColumns * steps) * kTileBytes;
    const SsdFactor v = gla_values(tiles, column);
    for (int b = 0; b < blocks; ++b) {
      multiply_row_block(keys.q_rows, right_factor(s_tiles, steps), steps, b, steps, tiles.products);
      multiply_row_block(tiles.weights, v, kSsdSteps, b, b + 1, tiles.products + kSsdRows * kSsdBlock);
    }
    write_gla_rows(tiles, head, column);
    update_decayed_state<false>(keys, v, blocks, tiles.products, state + column, tiles.head_dim, s_tiles);
  }
  release_tiles();
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
