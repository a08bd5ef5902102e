// SPDX-License-Identifier: Apache-2.0
// Codes become elements in registers, many at a time, with the bits of kernels/row_quantization.hpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/row_quantization.hpp"
#include "kernels/sm90/decode/compressed_params.hpp"

namespace ringattn::sm90 {

// The low or the high half of a register, of bf16 or fp16, as fp32.
template <class Element>
__device__ __forceinline__ float half_of(std::uint32_t pair, bool high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __uint_as_float(high ? pair & 0xffff0000U : pair << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? pair >> 16 : pair)));
  }
}

// The two quantized of E4M3 in the lower half of a word, as fp16, which holds every code.
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

// Four quantized of 8 bits, the first one lowest, as fp32.
template <bool kFp8>
__device__ __forceinline__ void widen_quantized(std::uint32_t quantized, float (&x)[4]) {
  if constexpr (kFp8) {
    const std::uint32_t halves[2] = {halves_of_two(quantized), halves_of_two(quantized >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = half_of<__half>(halves[i / 2], i % 2 != 0);
  } else {
    // 2^23 + 128 + code, whose lowest byte is the code with its sign turned over.
    const std::uint32_t turned = quantized ^ 0x80808080U;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] =
          __fadd_rn(__uint_as_float(__byte_perm(turned, 0x4b000000U, 0x7440U + static_cast<unsigned>(i))), -8388736.0F);
    }
  }
}

// Four elements of four quantized: each is multiplied in fp32, and the product is rounded.
template <class Element, bool kFp8>
__device__ __forceinline__ uint2 eight_bits(std::uint32_t quantized, float scale) {
  using Products = cuda::Products<Element>;
  float x[4];
  widen_quantized<kFp8>(quantized, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], scale);
  return {Products::pack(x[0], x[1]), Products::pack(x[2], x[3])};
}

// Two of them, the lower bytes of `quantized`.
template <bool kFp8>
__device__ __forceinline__ void widen_quantized(std::uint32_t quantized, float (&x)[2]) {
  float all[4];
  widen_quantized<kFp8>(quantized, all);
  x[0] = all[0];
  x[1] = all[1];
}

// Scales of two quantized, one in a word's bytes 0 and 1, one in bytes 2 and 3: in fp32, or as elements, which they are
// where are_element_scales() says so. Then a product in the elements' dtype has the same bits as one in fp32 that is
// rounded, for fp32 holds it.
struct Fp32Scales {
  float low, high;
};
struct ElementScales {
  std::uint32_t both;
};

// Codes of E4M3 are spread into bf16 without their bias, which is 120 less than bf16's; it is in the scale.
inline constexpr std::uint32_t kSpreadBias = 120U << 7;
inline constexpr std::uint32_t kSpreadMask = 0x07f007f0U;

// What is_leader against scales being elements: bits of `scale` where elements that are neither very great nor very
// small have others. Those of several scales may be joined by `or`.
template <class Element>
__device__ __forceinline__ std::uint32_t scale_deviation(std::uint32_t scale) {
  return scale ^ (std::is_same_v<Element, __nv_bfloat16> ? 0x20000000U : 0x38000000U);
}
// Of bf16 from 2^-63, of fp16 from 2^-15, to 2, with 8 significant bits.
template <class Element>
__device__ __forceinline__ bool are_element_scales(std::uint32_t deviations) {
  return (deviations & (std::is_same_v<Element, __nv_bfloat16> ? 0xe000ffffU : 0xf800ffffU)) == 0;
}
template <class Element>
__device__ __forceinline__ std::uint32_t element_scales(std::uint32_t low, std::uint32_t high, bool fp8) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __byte_perm(low, high, 0x7632) + (fp8 ? kSpreadBias * 0x10001U : 0U);
  } else {
    return cuda::Products<Element>::pack(__uint_as_float(low), __uint_as_float(high));
  }
}

// a · b of both halves.
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

// a · b + c of both halves, each rounded once.
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
// a & kMask, which stays the same word when it is shifted: the compiler would mask what it has shifted once more.
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

// Numbers of 8 bits, the lower bytes of the halves of `quantized`, as two elements. Both parts are 128, or 256 where
// the sign is set, but for the first one's 7 bits.
template <class Element>
__device__ __forceinline__ std::uint32_t elements_of_int8(std::uint32_t quantized) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    constexpr std::uint32_t kMagic = 0x43004300U;
    return fma_halves<Element>(mask_and_set<0x00800080U>(quantized, kMagic), 0xbf80bf80U,
                               mask_and_set<0x007f007fU>(quantized, kMagic));
  } else {  // 1024 + 128 + code, whose sign has been turned over
    return fma_halves<Element>(mask_and_set<0x00ff00ffU>(quantized ^ 0x00800080U, 0x64006400U), 0x3c003c00U,
                               0xe480e480U);
  }
}

// Elements of the quantized of 8 bits in the lower half of a word.
template <class Element, bool kFp8>
__device__ __forceinline__ std::uint32_t two_of_eight_bits(std::uint32_t quantized, const Fp32Scales& scales) {
  float x[2];
  widen_quantized<kFp8>(quantized, x);
  return cuda::Products<Element>::pack(__fmul_rn(x[0], scales.low), __fmul_rn(x[1], scales.high));
}

// Elements of the four quantized of 8 bits of a word: of bytes 0 and 2, and of 1 and 3.
struct ElementPairs {
  std::uint32_t even, odd;
};
template <class Element, bool kFp8>
__device__ __forceinline__ ElementPairs element_pairs(std::uint32_t quantized, const Fp32Scales& scales) {
  float x[4];
  widen_quantized<kFp8>(quantized, x);
  return {cuda::Products<Element>::pack(__fmul_rn(x[0], scales.low), __fmul_rn(x[2], scales.high)),
          cuda::Products<Element>::pack(__fmul_rn(x[1], scales.low), __fmul_rn(x[3], scales.high))};
}
template <class Element, bool kFp8>
__device__ __forceinline__ ElementPairs element_pairs(std::uint32_t quantized, const ElementScales& scales) {
  if constexpr (!kFp8) {
    return {multiply_halves<Element>(elements_of_int8<Element>(quantized), scales.both),
            multiply_halves<Element>(elements_of_int8<Element>(quantized >> 8), scales.both)};
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    // Exponent and mantissa go to bits 4 to 10 of a half, the sign to bit 15; of the other signs, which come along,
    // nothing is left.
    const std::uint32_t signs = masked<0x80808080U>(quantized);
    return {multiply_halves<Element>(select_bits(quantized << 4, signs << 8, kSpreadMask), scales.both),
            multiply_halves<Element>(select_bits(quantized >> 4, signs, kSpreadMask), scales.both)};
  } else {
    const std::uint32_t ordered = __byte_perm(quantized, 0, 0x3120);
    return {multiply_halves<Element>(halves_of_two(ordered), scales.both),
            multiply_halves<Element>(halves_of_two(ordered >> 16), scales.both)};
  }
}

// Of a scale and a zero of quantized of 4 bits, whether they are elements of which a fused product and sum may differ.
template <class Element>
__device__ __forceinline__ bool rounds_twice(std::uint32_t pair) {
  const float scale = half_of<Element>(pair, false);
  const float zero = fabsf(half_of<Element>(pair, true));
  return std::is_same_v<Element, __nv_bfloat16> ? int4_rounds_twice_to_bf16(scale, zero)
                                                : int4_rounds_twice_to_f16(scale, zero);
}

// Scales and zeros of eight neighbouring quantized of 4 bits, which are worked at as they lie in their word: code i
// beside code i + 4.
struct EightPairs {
  std::uint32_t scales[4], zeros[4];

  // `pair`: of all eight, a scale in the lower half and a zero in the upper one.
  __device__ __forceinline__ void set(std::uint32_t pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales[i] = __byte_perm(pair, 0, 0x1010);
      zeros[i] = __byte_perm(pair, 0, 0x3232);
    }
  }
  __device__ __forceinline__ void set(int i, std::uint32_t pair, std::uint32_t pair_of_four_behind) {
    scales[i] = __byte_perm(pair, pair_of_four_behind, 0x5410);
    zeros[i] = __byte_perm(pair, pair_of_four_behind, 0x7632);
  }
};

// Two elements of the quantized of 4 bits in the lowest bits of the halves of `quantized`; what else these hold doesn't
// count. `exact`: rounds_twice() doesn't hold for any of the pairs.
template <class Element>
__device__ __forceinline__ std::uint32_t two_of_four_bits(std::uint32_t quantized, std::uint32_t scales,
                                                          std::uint32_t zeros, bool exact) {
  constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
  constexpr std::uint32_t kMagic = kBf16 ? 0x43004300U : 0x64006400U;  // 128 or 1024, in front of a code
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
  return cuda::Products<Element>::pack(element(false), element(true));
}

// Eight quantized of a word, whatever their pairs are.
template <class Element>
__device__ __forceinline__ uint4 four_bits(std::uint32_t quantized, const EightPairs& pairs) {
  std::uint32_t x[4];  // of quantized i and i + 4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = two_of_four_bits<Element>(quantized >> 4 * i, pairs.scales[i], pairs.zeros[i], false);
  }
  return {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[0], x[1], 0x7632),
          __byte_perm(x[2], x[3], 0x7632)};
}

}  // namespace ringattn::sm90
