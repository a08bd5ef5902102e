// SPDX-License-Identifier: Apache-2.0
// Vector code for use with AMX tiles of bf16: packing of pairs, rounding, exp2. Subnormals are zero (FlushSubnormals).
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

// g++ 12 warns about undefined operands in its own intrinsics. Highway's headers disable the same warning.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// Loads elements [begin, begin + 32) of a row of `dims` elements. Elements after the last are zero, and so are all if
// `row` is null.
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

// Two rows of 32 elements as pairs, of elements 0 … 15 and of 16 … 31.
struct RowPairs {
  __m512i first;
  __m512i second;
};
HWY_INLINE RowPairs interleave_rows(__m512i even, __m512i odd) {
  // 64-bit elements of both vectors.
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512i low = _mm512_unpacklo_epi16(even, odd);
  const __m512i high = _mm512_unpackhi_epi16(even, odd);
  return {_mm512_permutex2var_epi64(low, first, high), _mm512_permutex2var_epi64(low, second, high)};
}

// Rounds two vectors to bf16, one after the other. Subnormals become zero. This is assembly because Highway's target
// does not include AVX512-BF16.
HWY_INLINE __m512i round_to_bf16(__m512 first, __m512 second) {
  __m512i rounded;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(rounded) : "v"(second), "v"(first));
  return rounded;
}

// 2^x: 0 where the result would be subnormal, NaN for NaN. Within 1.2 ulp.
HWY_INLINE __m512 amx_exp2(__m512 x) {
  constexpr int kMinusFloor = 0x09;
  const __m512 fraction = _mm512_reduce_ps(x, kMinusFloor);
  // A minimax fit of the relative error on [0, 1), with 2^0 = 1.
  __m512 p = _mm512_set1_ps(0x1.e97508p-10F);
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0x1.277852p-7F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0x1.c91ce6p-5F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0x1.ebdb56p-3F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0x1.62e4bap-1F));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(p, x);
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
