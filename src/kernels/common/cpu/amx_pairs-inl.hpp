// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 pairs in vectors: what packing for AMX tiles is made of.
#if defined(RINGATTN_KERNELS_CPU_AMX_PAIRS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_AMX_PAIRS_INL_HPP_
#undef RINGATTN_KERNELS_CPU_AMX_PAIRS_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_AMX_PAIRS_INL_HPP_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/common/cpu/amx_tiles.hpp"

#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3

// g++ 12 warns of its own intrinsics' undefined operands, as Highway's headers know.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// Elements [begin, begin + 32) of a row of `dims` elements; zero after the last, and where `row` is null.
HWY_INLINE __m512i load_pairs(const std::byte* row, int begin, int dims) {
  if (row == nullptr) return _mm512_setzero_si512();
  const std::byte* const at = row + 2 * begin;
  if (begin + kTileDepth <= dims) return _mm512_loadu_si512(at);
  return _mm512_maskz_loadu_epi16((1U << (dims - begin)) - 1U, at);
}

// Transposes 16 rows of 16 pairs, or of any 32-bit elements. `target` and `stride`, the bytes between its rows, are
// aligned to 64 bytes.
HWY_INLINE void transpose_pairs(const __m512i (&rows)[kTileRows], std::byte* target, std::size_t stride = 64) {
  __m512i twos[kTileRows];
  for (int i = 0; i < kTileRows; i += 2) {
    twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  // Columns c, c + 4, c + 8 and c + 12 of four rows.
  __m512i fours[kTileRows];
  for (int i = 0; i < kTileRows; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
  }
  constexpr int kEven = 0x88;  // blocks 0 and 2 of both vectors
  constexpr int kOdd = 0xdd;
  for (std::size_t c = 0; c < 4; ++c) {
    const __m512i low_even = _mm512_shuffle_i32x4(fours[c], fours[c + 4], kEven);
    const __m512i low_odd = _mm512_shuffle_i32x4(fours[c], fours[c + 4], kOdd);
    const __m512i high_even = _mm512_shuffle_i32x4(fours[c + 8], fours[c + 12], kEven);
    const __m512i high_odd = _mm512_shuffle_i32x4(fours[c + 8], fours[c + 12], kOdd);
    _mm512_store_si512(target + c * stride, _mm512_shuffle_i32x4(low_even, high_even, kEven));
    _mm512_store_si512(target + (c + 4) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, kEven));
    _mm512_store_si512(target + (c + 8) * stride, _mm512_shuffle_i32x4(low_even, high_even, kOdd));
    _mm512_store_si512(target + (c + 12) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, kOdd));
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
