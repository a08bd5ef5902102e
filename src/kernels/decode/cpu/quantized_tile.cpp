// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/cpu/quantized_tile.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

// g++ 12 warns about undefined operands in its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define RINGATTN_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")))
// Inlined because a row has only a few vectors: a call would take as long as they do.
#define RINGATTN_INLINE RINGATTN_AVX512 __attribute__((always_inline)) inline

namespace ringattn::cpu {

namespace {

constexpr int kRunDims = 32;    // elements of one vector of bf16
constexpr int kBlockDims = 16;  // elements of two rows in one vector
constexpr int kLineBytes = 64;
constexpr std::size_t kBlockBytes = 1024;  // of 16 dims of 32 keys
constexpr int kUsualDim = 128;             // has specialized loops

using RowLoad = bool (*)(const QuantizedRows& quantized, int first, int end, std::byte* rows);

// Rows with scales or zero points outside these limits are left to the codec. At or above the lower limit, the smallest
// nonzero element is a normal number: 1 · scale, 2^−9 · scale, or a multiple of the last bit of a scale or zero point.
// Up to the upper limit, elements are finite: −128 · scale, 480 · scale, 15 · scale + zero point.
struct Limits {
  float min;
  float max;
};
constexpr Limits kInt8Scales{0x1p-126F, 0x1p119F};
constexpr Limits kFp8Scales{0x1p-117F, 0x1p118F};
// In bits of bf16: 2^−100 … 2^122 of scales, 2^−125 … 2^126 of magnitudes of zero points. 0 is usual, too.
constexpr std::uint32_t kMinInt4Pair = 0x0100'0d80U;
constexpr std::uint32_t kMaxInt4Pair = 0x7e80'7c80U;

// By bits, because the vector ports are busy. The limits are positive, so a scale that is not is outside.
RINGATTN_INLINE bool is_usual(const std::byte* scale, const Limits& limits) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, scale, sizeof bits);
  const auto min = std::bit_cast<std::uint32_t>(limits.min);
  return bits - min <= std::bit_cast<std::uint32_t>(limits.max) - min;
}

// In all lanes.
RINGATTN_INLINE __m512 scale_at(const std::byte* address) {
  return _mm512_broadcastss_ps(_mm_load_ss(reinterpret_cast<const float*>(address)));
}

// Read instead of rows after a tile's last one.
alignas(64) constexpr std::byte kZeroRow[kMaxHeadDim] = {};

// Rows of a tile, from a key to the end of its page run.
struct RunRows {
  const std::byte* values;
  const std::byte* scales;
  std::int64_t value_stride;
  std::int64_t scale_stride;

  RINGATTN_INLINE RunRows(const QuantizedTile& tile, int key)
      : values(tile.values.at(key)),
        scales(tile.scales.at(key)),
        value_stride(tile.values.stride),
        scale_stride(tile.scales.stride) {}

  RINGATTN_INLINE void advance(int rows) {
    values += rows * value_stride;
    scales += rows * scale_stride;
  }
  // Prefetches rows into the L2 cache. Always inlined: g++ 12 considers a function that only prefetches to have no
  // effects, and drops its calls.
  RINGATTN_INLINE void request(int rows, int value_bytes) const {
    for (int i = 0; i < rows; ++i) {
      for (int line = 0; line < value_bytes; line += kLineBytes) {
        _mm_prefetch(values + i * value_stride + line, _MM_HINT_T1);
      }
      if (scales != nullptr) _mm_prefetch(scales + i * scale_stride, _MM_HINT_T1);
    }
  }
};

// The same rows of the next tile. Those of this tile if the next one is not known or has no such key: to request what
// is read now costs less than a branch for each row.
RINGATTN_INLINE RunRows next_rows(const QuantizedRows& quantized, int key) {
  const bool known = quantized.next != nullptr && key < quantized.next->keys;
  return {known ? *quantized.next : *quantized.tile, key};
}

RINGATTN_INLINE __m512i to_bf16(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

RINGATTN_INLINE __m128i load_16(const std::byte* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
RINGATTN_INLINE __m256i load_32(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

// 64 bytes, or the `bytes` that there are; a multiple of 16.
RINGATTN_INLINE __m512i load_line(const std::byte* at, int bytes) {
  if (bytes >= kLineBytes) return _mm512_loadu_si512(at);
  return _mm512_maskz_loadu_epi8((std::uint64_t{1} << bytes) - 1, at);
}

// `even` in lanes 0, 2, … and `odd` in the others. Each has one value in all lanes.
RINGATTN_INLINE __m512 alternate(__m512 even, __m512 odd) { return _mm512_unpacklo_ps(even, odd); }

// Bytes of two rows, interleaved: runs of 16 bytes, 8 from each row, in the order in which unpacking leaves them.
class BytePairs {
 public:
  RINGATTN_INLINE BytePairs(const std::byte* even, const std::byte* odd, int bytes) {
    for (int c = 0; c < bytes; c += kLineBytes) {
      const __m512i a = load_line(even + c, bytes - c);
      const __m512i b = load_line(odd + c, bytes - c);
      _mm512_store_si512(bytes_ + 2 * c, _mm512_unpacklo_epi8(a, b));
      _mm512_store_si512(bytes_ + 2 * c + kLineBytes, _mm512_unpackhi_epi8(a, b));
    }
  }

  // Bytes [16 · i, 16 · i + 8) of both rows, and [16 · i + 8, 16 · i + 16).
  const std::byte* first(int i) const { return bytes_ + i / 4 * 2 * kLineBytes + i % 4 * 16; }
  const std::byte* second(int i) const { return first(i) + kLineBytes; }

 private:
  alignas(64) std::byte bytes_[2 * kMaxHeadDim];
};
static_assert(kMaxHeadDim % kLineBytes == 0);

// An order of bytes for VPERMB.
struct alignas(64) ByteOrder {
  std::uint8_t bytes[64];

  RINGATTN_INLINE __m512i vector() const { return _mm512_load_si512(bytes); }
};
template <class Index>
constexpr ByteOrder byte_order(Index index) {
  ByteOrder order{};
  for (int i = 0; i < 64; ++i) order.bytes[i] = static_cast<std::uint8_t>(index(i));
  return order;
}

// [32 elements of the even row, 32 of the odd one], of 8 bits
RINGATTN_INLINE __m512i load_two_rows(const std::byte* even, const std::byte* odd) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_32(even)), load_32(odd), 1);
}

RINGATTN_INLINE __m512 scaled_int8(const std::byte* values, __m512 factor) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(values))), factor);
}

RINGATTN_INLINE void dequantize_int8(const std::byte* values, __m512 factor, int dim, std::byte* row) {
  for (int c = 0; c < dim; c += kRunDims) {
    const __m512 low = scaled_int8(values + c, factor);
    _mm512_store_si512(row + 2 * c, to_bf16(low, scaled_int8(values + c + kRunDims / 2, factor)));
  }
}

// Two rows as pairs.
RINGATTN_INLINE void dequantize_int8_pair(const std::byte* const (&values)[2], const __m512 (&scales)[2], int dim,
                                          std::byte* pairs) {
  const BytePairs bytes(values[0], values[1], dim);
  const __m512 factors = alternate(scales[0], scales[1]);
  for (int block = 0; block < dim / kBlockDims; ++block, pairs += kBlockBytes) {
    const __m512 low = scaled_int8(bytes.first(block), factors);
    _mm512_store_si512(pairs, to_bf16(low, scaled_int8(bytes.second(block), factors)));
  }
}

// E4M3: sign, exponent (4 bits), mantissa (3 bits). A power of two does not change how an element times the scale is
// rounded. So a table has only the elements with the least exponents, each times the scale, and the rest of the
// exponent is added to the result of the lookup. A NaN is read as 480, as CompressedCache allows.
//
// Multiples of 2^−9 less than 16: elements with exponents 0 (subnormal) and 1.
RINGATTN_INLINE __m512 fp8_elements(__m512 scale) {
  const __m512 elements = _mm512_setr_ps(0, 0x1p-9F, 0x2p-9F, 0x3p-9F, 0x4p-9F, 0x5p-9F, 0x6p-9F, 0x7p-9F, 0x8p-9F,
                                         0x9p-9F, 0xap-9F, 0xbp-9F, 0xcp-9F, 0xdp-9F, 0xep-9F, 0xfp-9F);
  return _mm512_mul_ps(elements, scale);
}
// Elements with exponents 2 and 3.
RINGATTN_INLINE __m512 greater_fp8_elements(__m512 scale) {
  const __m512 elements = _mm512_setr_ps(0x8p-8F, 0x9p-8F, 0xap-8F, 0xbp-8F, 0xcp-8F, 0xdp-8F, 0xep-8F, 0xfp-8F,
                                         0x8p-7F, 0x9p-7F, 0xap-7F, 0xbp-7F, 0xcp-7F, 0xdp-7F, 0xep-7F, 0xfp-7F);
  return _mm512_mul_ps(elements, scale);
}

// Lower and upper bytes of bf16. Exponents are taken in twos, as these bytes have them: an index has 0 or 1 for them,
// and the rest is added to the upper byte.
struct Fp8Tables {
  __m512i lower;
  __m512i upper;
};
// An element minus its index into the tables.
RINGATTN_INLINE __m512i fp8_rest(__m512i x) {
  return _mm512_subs_epu8(_mm512_and_si512(x, _mm512_set1_epi8(0x70)), _mm512_set1_epi8(0x10));
}
// The sign and the rest of the exponent.
RINGATTN_INLINE __m512i fp8_upper_bits(__m512i x, __m512i rest) {
  constexpr int kOrAnd = 0xf8;  // VPTERNLOG: a | (b & c)
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(rest, 4), x, _mm512_set1_epi8(-128), kOrAnd);
}

// 64 elements at once.
RINGATTN_INLINE void dequantize_fp8(const std::byte* values, __m512 scale, int dim, std::byte* row) {
  static constexpr ByteOrder kPlanes = byte_order([](int i) { return 2 * (i % 32) + i / 32; });
  // [32 lower bytes, 32 upper bytes]
  const __m512i table =
      _mm512_permutexvar_epi8(kPlanes.vector(), to_bf16(fp8_elements(scale), greater_fp8_elements(scale)));
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking leaves elements in turn
  for (int c = 0; c < dim; c += kLineBytes) {
    const bool whole = dim - c >= kLineBytes;
    const __m512i x = _mm512_permutexvar_epi64(order, load_line(values + c, dim - c));
    const __m512i rest = fp8_rest(x);
    const __m512i index = _mm512_sub_epi8(x, rest);  // with the sign, which VPERMB ignores
    const __m512i lower = _mm512_permutexvar_epi8(index, table);
    const __m512i upper = _mm512_add_epi8(
        _mm512_permutexvar_epi8(_mm512_or_si512(index, _mm512_set1_epi8(0x20)), table), fp8_upper_bits(x, rest));
    _mm512_store_si512(row + 2 * c, _mm512_unpacklo_epi8(lower, upper));
    if (whole) _mm512_store_si512(row + 2 * c + kLineBytes, _mm512_unpackhi_epi8(lower, upper));
  }
}

RINGATTN_INLINE void dequantize_fp8_pair(const std::byte* const (&values)[2], const __m512 (&scales)[2], int dim,
                                         std::byte* pairs) {
  // 8 bytes have elements 4 · i to 4 · i + 3 of both rows in turn, of the first 16 elements or of the second.
  static constexpr ByteOrder kOrder =
      byte_order([](int i) { return i % 2 * 32 + i / 8 % 2 * 16 + i / 16 * 4 + i % 8 / 2; });
  static constexpr ByteOrder kLower = byte_order([](int i) { return 2 * i; });
  static constexpr ByteOrder kUpper = byte_order([](int i) { return 2 * i + 1; });
  const __m512i order = kOrder.vector();
  // Entries of the even row, then of the odd one.
  const __m512i even = to_bf16(fp8_elements(scales[0]), greater_fp8_elements(scales[0]));
  const __m512i odd = to_bf16(fp8_elements(scales[1]), greater_fp8_elements(scales[1]));
  const Fp8Tables tables{_mm512_permutex2var_epi8(even, kLower.vector(), odd),
                         _mm512_permutex2var_epi8(even, kUpper.vector(), odd)};
  const __m512i odd_row = _mm512_set1_epi16(0x2000);
  for (int c = 0; c < dim; c += kRunDims, pairs += 2 * kBlockBytes) {
    const __m512i x = _mm512_permutexvar_epi8(order, load_two_rows(values[0] + c, values[1] + c));
    const __m512i rest = fp8_rest(x);
    const __m512i index = _mm512_or_si512(_mm512_sub_epi8(x, rest), odd_row);
    const __m512i lower = _mm512_permutexvar_epi8(index, tables.lower);
    const __m512i upper = _mm512_add_epi8(_mm512_permutexvar_epi8(index, tables.upper), fp8_upper_bits(x, rest));
    _mm512_store_si512(pairs, _mm512_unpacklo_epi8(lower, upper));
    _mm512_store_si512(pairs + kBlockBytes, _mm512_unpackhi_epi8(lower, upper));
  }
}

// Pairs of a scale and a zero point as vectors.
RINGATTN_INLINE __m512 scales_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
RINGATTN_INLINE __m512 zeros_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
}
// The lanes whose scale or zero point is outside its limits and not 0.
RINGATTN_INLINE __mmask32 unusual_int4(__m512i pairs) {
  const __m512i min = _mm512_set1_epi32(static_cast<int>(kMinInt4Pair));
  const __m512i range = _mm512_set1_epi32(static_cast<int>(kMaxInt4Pair - kMinInt4Pair));
  const __m512i bits = _mm512_and_si512(pairs, _mm512_set1_epi32(0x7fff'ffff));
  return _mm512_mask_cmpgt_epu16_mask(_mm512_test_epi16_mask(bits, bits), _mm512_sub_epi16(bits, min), range);
}
RINGATTN_INLINE __mmask16 lanes_below(int count) { return static_cast<__mmask16>((1U << std::min(16, count)) - 1U); }
RINGATTN_INLINE __mmask32 unusual_int4(const std::byte* pairs, int count) {
  __mmask32 unusual = 0;
  for (int i = 0; i < count; i += 16) {
    unusual |= unusual_int4(_mm512_maskz_loadu_epi32(lanes_below(count - i), pairs + 4 * i));
  }
  return unusual;
}

// The 16 elements of a pair: value · scale + zero point. The product is exact, so that it may be fused.
RINGATTN_INLINE __m512 int4_elements(const std::byte* pair) {
  const __m512 iota = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int bits = 0;
  std::memcpy(&bits, pair, sizeof bits);
  const __m512i pairs = _mm512_set1_epi32(bits);
  return _mm512_fmadd_ps(iota, scales_of(pairs), zeros_of(pairs));
}

// One group of 32 channels has 16 elements, which are a table. Returns false as load_quantized_rows() does.
RINGATTN_INLINE bool dequantize_int4_token(const std::byte* values, const std::byte* pairs, int dim, std::byte* row) {
  if (unusual_int4(pairs, dim / kRunDims) != 0) return false;
  for (int c = 0; c < dim; c += kRunDims, values += kRunDims / 2, pairs += 4) {
    const __m512 elements = int4_elements(pairs);
    const __m512i table = to_bf16(elements, elements);  // twice, so that bit 4 of an index does not matter
    const __m512i bytes = _mm512_cvtepu8_epi32(load_16(values));
    const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_store_si512(row + 2 * c, _mm512_permutexvar_epi16(index, table));
  }
  return true;
}

RINGATTN_INLINE bool dequantize_int4_token_pair(const std::byte* const (&values)[2],
                                                const std::byte* const (&scales)[2], int dim, std::byte* pairs) {
  if ((unusual_int4(scales[0], dim / kRunDims) | unusual_int4(scales[1], dim / kRunDims)) != 0) return false;
  // A byte has two channels: [even row, odd row] of the first, then of the second.
  const __m512i low = _mm512_set1_epi16(15);
  const __m512i shifts = _mm512_set1_epi64(0x0004'0004'0000'0000);
  const __m512i odd_row = _mm512_set1_epi32(0x0010'0000);
  const __m512i spread =
      _mm512_setr_epi32(static_cast<int>(0x8001'8000U), static_cast<int>(0x8001'8000U), static_cast<int>(0x8003'8002U),
                        static_cast<int>(0x8003'8002U), static_cast<int>(0x8005'8004U), static_cast<int>(0x8005'8004U),
                        static_cast<int>(0x8007'8006U), static_cast<int>(0x8007'8006U), static_cast<int>(0x8009'8008U),
                        static_cast<int>(0x8009'8008U), static_cast<int>(0x800b'800aU), static_cast<int>(0x800b'800aU),
                        static_cast<int>(0x800d'800cU), static_cast<int>(0x800d'800cU), static_cast<int>(0x800f'800eU),
                        static_cast<int>(0x800f'800eU));
  const BytePairs bytes(values[0], values[1], dim / 2);
  for (int run = 0; run < dim / kRunDims; ++run, pairs += 2 * kBlockBytes) {
    const __m512i table = to_bf16(int4_elements(scales[0] + 4 * run), int4_elements(scales[1] + 4 * run));
    for (int half = 0; half < 2; ++half) {
      const std::byte* const both = half == 0 ? bytes.first(run) : bytes.second(run);
      const __m512i nibbles =
          _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16(both)), spread), shifts);
      constexpr int kAndOr = 0xea;
      const __m512i index = _mm512_ternarylogic_epi32(nibbles, low, odd_row, kAndOr);
      _mm512_store_si512(pairs + half * kBlockBytes, _mm512_permutexvar_epi16(index, table));
    }
  }
  return true;
}

RINGATTN_AVX512 bool read_channel_scales(const QuantizedTile& tile, int group_first, int group, int dim,
                                         ChannelScales& scales) {
  alignas(64) std::uint32_t pairs[kMaxHeadDim + 32];  // each token's are written together with others after them
  const int per_token = dim / group;                  // up to 18
  const __mmask16 first_pairs = lanes_below(per_token);
  for (int token = 0; token < group; ++token) {
    const std::byte* const row = tile.scales.at(group_first + token);
    std::uint32_t* const to = pairs + token * per_token;
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi32(first_pairs, row));
    if (per_token <= 16) continue;
    _mm512_storeu_si512(to + 16, _mm512_maskz_loadu_epi32(lanes_below(per_token - 16), row + kLineBytes));
  }
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_or_si512(evens, _mm512_set1_epi32(1));
  __mmask32 unusual = 0;
  for (int run = 0; run < dim / kRunDims; ++run) {
    const __m512i low = _mm512_load_si512(pairs + run * kRunDims);
    const __m512i high = _mm512_load_si512(pairs + run * kRunDims + kRunDims / 2);
    unusual |= unusual_int4(low) | unusual_int4(high);
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i pair = _mm512_permutex2var_epi32(low, odd != 0 ? odds : evens, high);
      _mm512_store_ps(scales.scale[run][odd], scales_of(pair));
      _mm512_store_ps(scales.zero[run][odd], zeros_of(pair));
    }
  }
  scales.first = group_first;
  return unusual == 0;
}

RINGATTN_INLINE void dequantize_int4_channel(const std::byte* values, const ChannelScales& scales, int dim,
                                             std::byte* row) {
  // Lane 2 · i of even channels, in the lower half of a vector, and lane 2 · i + 1 of odd ones.
  alignas(64) static constexpr std::uint16_t kOrder[kRunDims] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                 21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  const __m512 iota = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int run = 0; run < dim / kRunDims; ++run, values += kRunDims / 2, row += 2 * kRunDims) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_16(values));
    const __m512 even = _mm512_permutexvar_ps(bytes, iota);  // by the lower four bits
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
    const __m512 low = _mm512_fmadd_ps(even, _mm512_load_ps(scales.scale[run][0]), _mm512_load_ps(scales.zero[run][0]));
    const __m512 high = _mm512_fmadd_ps(odd, _mm512_load_ps(scales.scale[run][1]), _mm512_load_ps(scales.zero[run][1]));
    _mm512_store_si512(row, _mm512_permutexvar_epi16(order, to_bf16(low, high)));
  }
}

// Two rows of bf16 as pairs.
RINGATTN_INLINE void pair_rows(const std::byte* even, const std::byte* odd, int dim, std::byte* pairs) {
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int c = 0; c < dim; c += kRunDims, pairs += 2 * kBlockBytes) {
    const __m512i a = _mm512_load_si512(even + 2 * c);
    const __m512i b = _mm512_load_si512(odd + 2 * c);
    const __m512i low = _mm512_unpacklo_epi16(a, b);
    const __m512i high = _mm512_unpackhi_epi16(a, b);
    _mm512_store_si512(pairs, _mm512_permutex2var_epi64(low, first, high));
    _mm512_store_si512(pairs + kBlockBytes, _mm512_permutex2var_epi64(low, second, high));
  }
}

// Per format: a row, and two rows as pairs. They return false as load_quantized_rows() does.
struct Int8Rows {
  static constexpr int kBits = 8;

  RINGATTN_INLINE static bool row(const QuantizedRows&, int, const std::byte* values, const std::byte* scales, int dim,
                                  std::byte* row) {
    if (!is_usual(scales, kInt8Scales)) return false;
    dequantize_int8(values, scale_at(scales), dim, row);
    return true;
  }
  RINGATTN_INLINE static bool pair(const QuantizedRows&, int, const std::byte* const (&values)[2],
                                   const std::byte* const (&scales)[2], int dim, std::byte* pairs) {
    if (!is_usual(scales[0], kInt8Scales) || !is_usual(scales[1], kInt8Scales)) return false;
    const __m512 two[2] = {scale_at(scales[0]), scale_at(scales[1])};
    dequantize_int8_pair(values, two, dim, pairs);
    return true;
  }
};

struct Fp8Rows {
  static constexpr int kBits = 8;

  RINGATTN_INLINE static const std::byte* scale_of(const QuantizedRows& quantized, const std::byte* scales) {
    return scales != nullptr ? scales : reinterpret_cast<const std::byte*>(&quantized.tile->one_scale);
  }
  RINGATTN_INLINE static bool row(const QuantizedRows& quantized, int, const std::byte* values, const std::byte* scales,
                                  int dim, std::byte* row) {
    const std::byte* const scale = scale_of(quantized, scales);
    if (!is_usual(scale, kFp8Scales)) return false;
    dequantize_fp8(values, scale_at(scale), dim, row);
    return true;
  }
  RINGATTN_INLINE static bool pair(const QuantizedRows& quantized, int, const std::byte* const (&values)[2],
                                   const std::byte* const (&scales)[2], int dim, std::byte* pairs) {
    const std::byte* const even = scale_of(quantized, scales[0]);
    const std::byte* const odd = scale_of(quantized, scales[1]);
    if (!is_usual(even, kFp8Scales) || !is_usual(odd, kFp8Scales)) return false;
    const __m512 two[2] = {scale_at(even), scale_at(odd)};
    dequantize_fp8_pair(values, two, dim, pairs);
    return true;
  }
};

struct Int4TokenRows {
  static constexpr int kBits = 4;

  RINGATTN_INLINE static bool row(const QuantizedRows&, int, const std::byte* values, const std::byte* scales, int dim,
                                  std::byte* row) {
    return dequantize_int4_token(values, scales, dim, row);
  }
  RINGATTN_INLINE static bool pair(const QuantizedRows&, int, const std::byte* const (&values)[2],
                                   const std::byte* const (&scales)[2], int dim, std::byte* pairs) {
    return dequantize_int4_token_pair(values, scales, dim, pairs);
  }
};

struct Int4ChannelRows {
  static constexpr int kBits = 4;

  RINGATTN_INLINE static bool row(const QuantizedRows& quantized, int key, const std::byte* values, const std::byte*,
                                  int dim, std::byte* row) {
    const int group = quantized.format->group;
    ChannelScales& channels = *quantized.channels;
    if (key < channels.first || key >= channels.first + group) {
      if (!read_channel_scales(*quantized.tile, key / group * group, group, dim, channels)) return false;
    }
    dequantize_int4_channel(values, channels, dim, row);
    return true;
  }
  // Groups have an even number of keys.
  RINGATTN_INLINE static bool pair(const QuantizedRows& quantized, int key, const std::byte* const (&values)[2],
                                   const std::byte* const (&)[2], int dim, std::byte* pairs) {
    alignas(64) std::byte rows[2][2 * kMaxHeadDim];
    for (int i = 0; i < 2; ++i) {
      if (!row(quantized, key + i, values[i], nullptr, dim, rows[i])) return false;
    }
    pair_rows(rows[0], rows[1], dim, pairs);
    return true;
  }
};

int run_end(int key, int end) { return std::min(end, key / kMinPageRunKeys * kMinPageRunKeys + kMinPageRunKeys); }

// kDim: the dim, or 0 for any.
template <class Rows, int kDim>
RINGATTN_AVX512 bool load_rows(const QuantizedRows& quantized, int first, int end, std::byte* rows) {
  const int dim = kDim != 0 ? kDim : quantized.dim;
  for (int key = first; key < end;) {
    RunRows run(*quantized.tile, key);
    RunRows next = next_rows(quantized, key);
    for (const int last = run_end(key, end); key < last; ++key, rows += 2 * dim) {
      next.request(1, dim * Rows::kBits / 8);
      if (!Rows::row(quantized, key, run.values, run.scales, dim, rows)) return false;
      run.advance(1);
      next.advance(1);
    }
  }
  return true;
}

template <class Rows, int kDim>
RINGATTN_AVX512 bool load_pairs(const QuantizedRows& quantized, int first, int end, std::byte* pairs) {
  const int dim = kDim != 0 ? kDim : quantized.dim;
  const int keys = quantized.tile->keys;
  int key = first;
  while (key < std::min(end, keys)) {
    RunRows run(*quantized.tile, key);
    RunRows next = next_rows(quantized, key);
    for (const int last = run_end(key, std::min(end, keys)); key < last; key += 2, pairs += kLineBytes) {
      next.request(2, dim * Rows::kBits / 8);
      // The row after the last one is 0 times its scale, or has pairs of zeros.
      const bool both = key + 1 < keys;
      const std::byte* const two_values[2] = {run.values, both ? run.values + run.value_stride : kZeroRow};
      const std::byte* const two_scales[2] = {run.scales, both               ? run.scales + run.scale_stride
                                                          : Rows::kBits == 4 ? kZeroRow
                                                                             : run.scales};
      if (!Rows::pair(quantized, key, two_values, two_scales, dim, pairs)) return false;
      run.advance(2);
      next.advance(2);
    }
  }
  for (; key < end; key += 2, pairs += kLineBytes) {
    for (int block = 0; block < dim / kBlockDims; ++block) {
      _mm512_store_si512(pairs + static_cast<std::size_t>(block) * kBlockBytes, _mm512_setzero_si512());
    }
  }
  return true;
}

// A format's loops over rows, or over pairs, for a dim.
template <class Rows, bool kPairs>
RowLoad load_of_dim(int dim) {
  if constexpr (kPairs) return dim == kUsualDim ? &load_pairs<Rows, kUsualDim> : &load_pairs<Rows, 0>;
  return dim == kUsualDim ? &load_rows<Rows, kUsualDim> : &load_rows<Rows, 0>;
}

template <bool kPairs>
RowLoad load_of(const QuantizedRows& quantized) {
  switch (quantized.format->encoding) {
    case RowEncoding::kInt8:
      return load_of_dim<Int8Rows, kPairs>(quantized.dim);
    case RowEncoding::kFp8:
      return load_of_dim<Fp8Rows, kPairs>(quantized.dim);
    case RowEncoding::kInt4Token:
      return load_of_dim<Int4TokenRows, kPairs>(quantized.dim);
    default:  // kInt4Channel: dequantizes_tiles()
      return load_of_dim<Int4ChannelRows, kPairs>(quantized.dim);
  }
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
  const auto& quantized = *static_cast<const QuantizedRows*>(quantized_rows);
  return load_of<false>(quantized)(quantized, first, end, rows);
}

bool load_quantized_pairs(const void* quantized_rows, int first, int end, std::byte* pairs) {
  const auto& quantized = *static_cast<const QuantizedRows*>(quantized_rows);
  return load_of<true>(quantized)(quantized, first, end, pairs);
}

}  // namespace ringattn::cpu

#pragma GCC diagnostic pop

#else

namespace ringattn::cpu {

bool dequantizes_tiles(const RowFormat&, const RowShape&) { return false; }
bool load_quantized_rows(const void*, int, int, std::byte*) { return false; }
bool load_quantized_pairs(const void*, int, int, std::byte*) { return false; }

}  // namespace ringattn::cpu

#endif
