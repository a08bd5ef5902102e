// SPDX-License-Identifier: Apache-2.0
// Dequantization in registers, several values at a time, bitwise as in kernels/quant/row_quantization.hpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn::sm90 {

// The low or the high half of a bf16x2 or fp16x2 register, as fp32.
template <class Element>
__device__ __forceinline__ float half_of(std::uint32_t pair, bool high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __uint_as_float(high ? pair & 0xffff0000U : pair << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? pair >> 16 : pair)));
  }
}

// Converts the two E4M3 values in the low half of a word to fp16x2, which represents every E4M3 value.
__device__ __forceinline__ std::uint32_t halves_of_two(std::uint32_t quantized) {
  std::uint32_t halves;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}"
      : "=r"(halves)
      : "r"(quantized));
  return halves;
}

// Converts four 8-bit values, the first one in the lowest byte, to fp32.
template <bool kFp8>
__device__ __forceinline__ void widen_quantized(std::uint32_t quantized, float (&x)[4]) {
  if constexpr (kFp8) {
    const std::uint32_t halves[2] = {halves_of_two(quantized), halves_of_two(quantized >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = half_of<__half>(halves[i / 2], i % 2 != 0);
  } else {
    // 2^23 + 128 + value, where the lowest byte is the value with its sign bit flipped.
    const std::uint32_t turned = quantized ^ 0x80808080U;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] =
          __fadd_rn(__uint_as_float(__byte_perm(turned, 0x4b000000U, 0x7440U + static_cast<unsigned>(i))), -8388736.0F);
    }
  }
}

// Dequantizes four values: multiplies in fp32 and rounds the products.
template <class Element, bool kFp8>
__device__ __forceinline__ uint2 eight_bits(std::uint32_t quantized, float scale) {
  using Mma = cuda::MmaTraits<Element>;
  float x[4];
  widen_quantized<kFp8>(quantized, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], scale);
  return {Mma::pack(x[0], x[1]), Mma::pack(x[2], x[3])};
}

// Converts the two values in the lower bytes of `quantized`.
template <bool kFp8>
__device__ __forceinline__ void widen_quantized(std::uint32_t quantized, float (&x)[2]) {
  float all[4];
  widen_quantized<kFp8>(quantized, all);
  x[0] = all[0];
  x[1] = all[1];
}

// Scales of two values, one in bytes 0 and 1 of a word and one in bytes 2 and 3: in fp32, or as elements if
// are_element_scales() allows it. In that case a product in the element type is bitwise equal to a rounded fp32
// product, since fp32 represents it exactly.
struct Fp32Scales {
  float low, high;
};
struct ElementScales {
  std::uint32_t both;
};

// E4M3 bits are spread into bf16 without changing the exponent bias, which is 120 less than bf16's. The scale makes up
// for it.
inline constexpr std::uint32_t kSpreadBias = 120U << 7;
inline constexpr std::uint32_t kSpreadMask = 0x07f007f0U;

// Bits in which `scale` differs from elements of moderate magnitude. Those of several scales may be combined by `or`.
template <class Element>
__device__ __forceinline__ std::uint32_t scale_deviation(std::uint32_t scale) {
  return scale ^ (std::is_same_v<Element, __nv_bfloat16> ? 0x20000000U : 0x38000000U);
}
// Whether scales are from 2^-63 (bf16) or 2^-15 (fp16) to 2, with 8 significant bits.
template <class Element>
__device__ __forceinline__ bool are_element_scales(std::uint32_t deviations) {
  return (deviations & (std::is_same_v<Element, __nv_bfloat16> ? 0xe000ffffU : 0xf800ffffU)) == 0;
}
template <class Element>
__device__ __forceinline__ std::uint32_t element_scales(std::uint32_t low, std::uint32_t high, bool fp8) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __byte_perm(low, high, 0x7632) + (fp8 ? kSpreadBias * 0x10001U : 0U);
  } else {
    return cuda::MmaTraits<Element>::pack(__uint_as_float(low), __uint_as_float(high));
  }
}

// a · b in both halves.
template <class Element>
__device__ __forceinline__ std::uint32_t multiply_halves(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

// a · b + c in both halves, each rounded once.
template <class Element>
__device__ __forceinline__ std::uint32_t fma_halves(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  }
  return r;
}

// The bits of `a` where `mask` has ones, else those of `b`.
__device__ __forceinline__ std::uint32_t select_bits(std::uint32_t a, std::uint32_t b, std::uint32_t mask) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
  return r;
}
// a & kMask, opaque to the compiler, which would otherwise mask again after a shift.
template <std::uint32_t kMask>
__device__ __forceinline__ std::uint32_t masked(std::uint32_t a) {
  std::uint32_t r;
  asm("and.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "n"(kMask));
  return r;
}
// a & kMask | set, as one instruction.
template <std::uint32_t kMask>
__device__ __forceinline__ std::uint32_t mask_and_set(std::uint32_t a, std::uint32_t set) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "n"(kMask), "r"(set));
  return r;
}

// Converts int8 values, the lower bytes of the halves of `quantized`, to two elements. Both terms are 128, or 256 if
// the sign is set, plus the 7 low bits in the first one.
template <class Element>
__device__ __forceinline__ std::uint32_t elements_of_int8(std::uint32_t quantized) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    constexpr std::uint32_t kMagic = 0x43004300U;
    return fma_halves<Element>(mask_and_set<0x00800080U>(quantized, kMagic), 0xbf80bf80U,
                               mask_and_set<0x007f007fU>(quantized, kMagic));
  } else {  // 1024 + 128 + value, whose sign bit has been flipped
    return fma_halves<Element>(mask_and_set<0x00ff00ffU>(quantized ^ 0x00800080U, 0x64006400U), 0x3c003c00U,
                               0xe480e480U);
  }
}

// Dequantizes the two 8-bit values in the low half of a word.
template <class Element, bool kFp8>
__device__ __forceinline__ std::uint32_t two_of_eight_bits(std::uint32_t quantized, const Fp32Scales& scales) {
  float x[2];
  widen_quantized<kFp8>(quantized, x);
  return cuda::MmaTraits<Element>::pack(__fmul_rn(x[0], scales.low), __fmul_rn(x[1], scales.high));
}

// Dequantizes the four 8-bit values of a word: bytes 0 and 2, and bytes 1 and 3.
struct ElementPairs {
  std::uint32_t even, odd;
};
template <class Element, bool kFp8>
__device__ __forceinline__ ElementPairs element_pairs(std::uint32_t quantized, const Fp32Scales& scales) {
  float x[4];
  widen_quantized<kFp8>(quantized, x);
  return {cuda::MmaTraits<Element>::pack(__fmul_rn(x[0], scales.low), __fmul_rn(x[2], scales.high)),
          cuda::MmaTraits<Element>::pack(__fmul_rn(x[1], scales.low), __fmul_rn(x[3], scales.high))};
}
template <class Element, bool kFp8>
__device__ __forceinline__ ElementPairs element_pairs(std::uint32_t quantized, const ElementScales& scales) {
  if constexpr (!kFp8) {
    return {multiply_halves<Element>(elements_of_int8<Element>(quantized), scales.both),
            multiply_halves<Element>(elements_of_int8<Element>(quantized >> 8), scales.both)};
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    // Exponent and mantissa go to bits 4 to 10 of a half, and the sign to bit 15. The mask removes the other sign bits.
    const std::uint32_t signs = masked<0x80808080U>(quantized);
    return {multiply_halves<Element>(select_bits(quantized << 4, signs << 8, kSpreadMask), scales.both),
            multiply_halves<Element>(select_bits(quantized >> 4, signs, kSpreadMask), scales.both)};
  } else {
    const std::uint32_t ordered = __byte_perm(quantized, 0, 0x3120);
    return {multiply_halves<Element>(halves_of_two(ordered), scales.both),
            multiply_halves<Element>(halves_of_two(ordered >> 16), scales.both)};
  }
}

// Whether value · scale + zero point, rounded once to the element type, may differ from dequantize_int4(), which rounds
// to fp32 first. `pair` is a scale and a zero point.
template <class Element>
__device__ __forceinline__ bool rounds_twice(std::uint32_t pair) {
  const float scale = half_of<Element>(pair, false);
  const float zero = fabsf(half_of<Element>(pair, true));
  return std::is_same_v<Element, __nv_bfloat16> ? int4_rounds_twice_to_bf16(scale, zero)
                                                : int4_rounds_twice_to_f16(scale, zero);
}

// Scales and zero points of eight adjacent 4-bit values, in the order of their word: value i with value i + 4.
struct EightPairs {
  std::uint32_t scales[4], zeros[4];

  // One `pair` for all eight: the scale in the low half, the zero point in the high half.
  __device__ __forceinline__ void set(std::uint32_t pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales[i] = __byte_perm(pair, 0, 0x1010);
      zeros[i] = __byte_perm(pair, 0, 0x3232);
    }
  }
  __device__ __forceinline__ void set(int i, std::uint32_t pair, std::uint32_t pair_plus_4) {
    scales[i] = __byte_perm(pair, pair_plus_4, 0x5410);
    zeros[i] = __byte_perm(pair, pair_plus_4, 0x7632);
  }
};

// Dequantizes the two 4-bit values in the lowest bits of the halves of `quantized`; other bits are ignored. `exact`:
// rounds_twice() holds for none of the pairs.
template <class Element>
__device__ __forceinline__ std::uint32_t two_of_four_bits(std::uint32_t quantized, std::uint32_t scales,
                                                          std::uint32_t zeros, bool exact) {
  constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
  constexpr std::uint32_t kMagic = kBf16 ? 0x43004300U : 0x64006400U;  // 128 or 1024, in the bits above a value
  if (exact) {
    const std::uint32_t integers =
        fma_halves<Element>(mask_and_set<0x000f000fU>(quantized, kMagic), kBf16 ? 0x3f803f80U : 0x3c003c00U,
                            kBf16 ? 0xc300c300U : 0xe400e400U);  // · 1 − 128 or 1024
    return fma_halves<Element>(integers, scales, zeros);
  }
  const auto element = [&](bool high) {
    return dequantize_int4(static_cast<std::uint8_t>((high ? quantized >> 16 : quantized) & 0xfU),
                           half_of<Element>(scales, high), half_of<Element>(zeros, high));
  };
  return cuda::MmaTraits<Element>::pack(element(false), element(true));
}

// Dequantizes the eight 4-bit values of a word, for any pairs.
template <class Element>
__device__ __forceinline__ uint4 four_bits(std::uint32_t quantized, const EightPairs& pairs) {
  std::uint32_t x[4];  // values i and i + 4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = two_of_four_bits<Element>(quantized >> 4 * i, pairs.scales[i], pairs.zeros[i], false);
  }
  return {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[0], x[1], 0x7632),
          __byte_perm(x[2], x[3], 0x7632)};
}

}  // namespace ringattn::sm90
