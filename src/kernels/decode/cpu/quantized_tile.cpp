// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/cpu/quantized_tile.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>

// g++ 12 warns of its own intrinsics' undefined operands.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define RINGATTN_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace ringattn::cpu {

namespace {

constexpr int kRunDims = 32;  // elements of one vector of bf16
constexpr int kLineBytes = 64;
// From these scales on, the least element but zero is a normal number: 1 · scale, 2^−9 · scale, and a multiple of the
// last bit of a scale or zero point.
constexpr float kMinInt8Scale = 0x1p-126F;
constexpr float kMinFp8Scale = 0x1p-117F;
constexpr float kMinInt4Scale = 0x1p-100F;
// The element of value 0 is twice the half of a zero point, and the half is a normal number or zero.
constexpr float kMinInt4Zero = 0x1p-125F;

bool is_usual(float scale, float min) { return scale >= min && scale <= std::numeric_limits<float>::max(); }

float scale_at(const std::byte* address) {
  float value = 0.0F;
  std::memcpy(&value, address, sizeof value);
  return value;
}

// Requests row `key` of the next tile, into the L2 cache. Always inlined: g++ 12 takes a function of prefetches for one
// without effects, and drops its calls.
RINGATTN_AVX512 __attribute__((always_inline)) inline void request_row(const QuantizedTile* next, int key,
                                                                       int value_bytes) {
  if (next == nullptr || key >= next->keys) return;
  const std::byte* const row = next->values.at(key);
  for (int line = 0; line < value_bytes; line += kLineBytes) _mm_prefetch(row + line, _MM_HINT_T1);
  if (next->scales.page_runs[0] != nullptr) _mm_prefetch(next->scales.at(key), _MM_HINT_T1);
}

RINGATTN_AVX512 inline __m512i to_bf16(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Lane 2 · i of elements 0, 2, … in the lower half of a vector, and lane 2 · i + 1 of those in the upper half.
RINGATTN_AVX512 inline __m512i interleave_halves(__m512i halves) {
  alignas(64) static constexpr std::uint16_t kOrder[kRunDims] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                 21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

RINGATTN_AVX512 inline __m128i load_16(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}
RINGATTN_AVX512 inline __m256i load_32(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

RINGATTN_AVX512 void dequantize_int8(const std::byte* values, float scale, int dim, std::byte* row) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int c = 0; c < dim; c += kRunDims) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(values + c)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(values + c + kRunDims / 2)));
    _mm512_store_si512(row + 2 * c, to_bf16(_mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor)));
  }
}

// E4M3 is exact in bf16: fields move by 4 bits and the exponent's bias by 120. Subnormals, multiples of 2^−9 below 8,
// come from a table. A NaN is read as 480, as CompressedCache allows.
RINGATTN_AVX512 void dequantize_fp8(const std::byte* values, float scale, int dim, std::byte* row) {
  alignas(64) static constexpr std::uint16_t kSubnormals[kRunDims] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                                      0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i subnormals = _mm512_load_si512(kSubnormals);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int c = 0; c < dim; c += kRunDims) {
    const __m512i words = _mm512_cvtepu8_epi16(load_32(values + c));
    const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
    __m512i number = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    number = _mm512_mask_permutexvar_epi16(number, small, magnitude, subnormals);
    const __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(words, magnitude), 8);
    number = _mm512_or_si512(number, sign);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(number, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(number, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
    const __m512i halves = to_bf16(_mm512_mul_ps(even, factor), _mm512_mul_ps(odd, factor));
    _mm512_store_si512(row + 2 * c, interleave_halves(halves));
  }
}

// One group of 32 channels has 16 elements, which are a table. Returns false as load_quantized_rows() does.
RINGATTN_AVX512 bool dequantize_int4_token(const std::byte* values, const std::byte* pairs, int dim, std::byte* row) {
  const __m512 half = _mm512_set1_ps(0.5F);
  const __m512 iota = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int c = 0; c < dim; c += kRunDims, values += kRunDims / 2, pairs += 4) {
    std::uint32_t pair = 0;
    std::memcpy(&pair, pairs, sizeof pair);
    const std::uint32_t bits[2] = {pair << 16, pair & 0xffff0000U};
    float scale_and_zero[2];
    std::memcpy(scale_and_zero, bits, sizeof bits);
    const auto [scale, zero] = scale_and_zero;
    const bool no_scale = (pair & 0x7fffU) == 0;  // by its bits: subnormals count as zero in comparisons here
    if (!no_scale && !is_usual(scale, kMinInt4Scale)) return false;
    if (zero != 0.0F && !is_usual(std::abs(zero), kMinInt4Zero)) return false;  // a subnormal one is zero here
    const __m512 scaled = _mm512_mul_ps(iota, _mm512_mul_ps(half, _mm512_set1_ps(scale)));
    const __m512 sum = _mm512_add_ps(scaled, _mm512_mul_ps(half, _mm512_set1_ps(zero)));
    const __m512 elements = _mm512_mul_ps(_mm512_set1_ps(2.0F), sum);
    const __m512i table = to_bf16(elements, elements);  // twice, so that bit 4 of an index does not matter
    const __m512i bytes = _mm512_cvtepu8_epi32(load_16(values));
    const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_store_si512(row + 2 * c, _mm512_permutexvar_epi16(index, table));
  }
  return true;
}

// The halves of scales and zero points of a group of tokens, for even channels and for odd ones.
struct ChannelScales {
  alignas(64) float scale[kMaxHeadDim / kRunDims][2][kRunDims / 2];
  alignas(64) float zero[kMaxHeadDim / kRunDims][2][kRunDims / 2];
};

RINGATTN_AVX512 bool read_channel_scales(const QuantizedTile& tile, int first, int group, int dim,
                                         ChannelScales& scales) {
  alignas(64) std::uint32_t pairs[kMaxHeadDim];
  const auto per_token = static_cast<std::size_t>(dim / group);
  for (int token = 0; token < group; ++token) {
    std::memcpy(pairs + static_cast<std::size_t>(token) * per_token, tile.scales.at(first + token),
                per_token * sizeof(std::uint32_t));
  }
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_or_si512(evens, _mm512_set1_epi32(1));
  const __m512 max = _mm512_set1_ps(std::numeric_limits<float>::max());
  const __m512 half = _mm512_set1_ps(0.5F);
  __mmask16 unusual = 0;
  for (int run = 0; run < dim / kRunDims; ++run) {
    const __m512i low = _mm512_load_si512(pairs + run * kRunDims);
    const __m512i high = _mm512_load_si512(pairs + run * kRunDims + kRunDims / 2);
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i pair = _mm512_permutex2var_epi32(low, odd != 0 ? odds : evens, high);
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
      const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
      const __mmask16 nonzero = _mm512_test_epi32_mask(pair, _mm512_set1_epi32(0x7fff));
      unusual |= _mm512_mask_cmp_ps_mask(nonzero, scale, _mm512_set1_ps(kMinInt4Scale), _CMP_NGE_UQ);
      unusual |= _mm512_cmp_ps_mask(scale, max, _CMP_NLE_UQ);
      const __mmask16 has_zero = _mm512_cmp_ps_mask(zero, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      unusual |= _mm512_mask_cmp_ps_mask(has_zero, _mm512_abs_ps(zero), _mm512_set1_ps(kMinInt4Zero), _CMP_NGE_UQ);
      unusual |= _mm512_cmp_ps_mask(_mm512_abs_ps(zero), max, _CMP_NLE_UQ);
      _mm512_store_ps(scales.scale[run][odd], _mm512_mul_ps(half, scale));
      _mm512_store_ps(scales.zero[run][odd], _mm512_mul_ps(half, zero));
    }
  }
  return unusual == 0;
}

RINGATTN_AVX512 void dequantize_int4_channel(const std::byte* values, const ChannelScales& scales, int dim,
                                             std::byte* row) {
  const __m512 two = _mm512_set1_ps(2.0F);
  for (int run = 0; run < dim / kRunDims; ++run, values += kRunDims / 2, row += 2 * kRunDims) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_16(values));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
    const __m512 even_sum =
        _mm512_add_ps(_mm512_mul_ps(even, _mm512_load_ps(scales.scale[run][0])), _mm512_load_ps(scales.zero[run][0]));
    const __m512 odd_sum =
        _mm512_add_ps(_mm512_mul_ps(odd, _mm512_load_ps(scales.scale[run][1])), _mm512_load_ps(scales.zero[run][1]));
    const __m512i halves = to_bf16(_mm512_mul_ps(two, even_sum), _mm512_mul_ps(two, odd_sum));
    _mm512_store_si512(row, interleave_halves(halves));
  }
}

RINGATTN_AVX512 bool dequantize(const QuantizedRows& quantized, int first, int end, std::byte* rows) {
  const RowFormat& format = *quantized.format;
  const QuantizedTile& tile = *quantized.tile;
  const int dim = quantized.dim;
  const bool by_token = tile.scales.page_runs[0] != nullptr;
  ChannelScales channels;
  for (int key = first; key < end; ++key, rows += 2 * dim) {
    const std::byte* const values = tile.values.at(key);
    if (format.encoding == RowEncoding::kInt8 || format.encoding == RowEncoding::kFp8) {
      request_row(quantized.next, key, dim);
      const bool int8 = format.encoding == RowEncoding::kInt8;
      const float scale = by_token ? scale_at(tile.scales.at(key)) : tile.one_scale;
      if (!is_usual(scale, int8 ? kMinInt8Scale : kMinFp8Scale)) return false;
      int8 ? dequantize_int8(values, scale, dim, rows) : dequantize_fp8(values, scale, dim, rows);
      continue;
    }
    request_row(quantized.next, key, dim / 2);
    if (format.encoding == RowEncoding::kInt4Token) {
      if (!dequantize_int4_token(values, tile.scales.at(key), dim, rows)) return false;
      continue;
    }
    const int group = key / format.group * format.group;
    if ((key == first || key == group) && !read_channel_scales(tile, group, format.group, dim, channels)) return false;
    dequantize_int4_channel(values, channels, dim, rows);
  }
  return true;
}

}  // namespace

bool dequantizes_tiles(const RowFormat& format, const RowShape& shape) {
  if (shape.dtype != Dtype::kBf16 || shape.dim % kRunDims != 0 || shape.dim > kMaxHeadDim) return false;
  switch (format.encoding) {
    case RowEncoding::kInt8:
    case RowEncoding::kFp8:
      return true;
    case RowEncoding::kInt4Channel:
      return shape.dim % format.group == 0;
    case RowEncoding::kInt4Token:
      return format.group == kRunDims;
    default:
      return false;
  }
}

bool load_quantized_rows(const void* quantized_rows, int first, int end, std::byte* rows) {
  return dequantize(*static_cast<const QuantizedRows*>(quantized_rows), first, end, rows);
}

}  // namespace ringattn::cpu

#pragma GCC diagnostic pop

#else

namespace ringattn::cpu {

bool dequantizes_tiles(const RowFormat&, const RowShape&) { return false; }
bool load_quantized_rows(const void*, int, int, std::byte*) { return false; }

}  // namespace ringattn::cpu

#endif
