// SPDX-License-Identifier: Apache-2.0
// Codes become elements in registers, many at a time, with the bits of kernels/row_codes.hpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/row_codes.hpp"
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

// Four codes of 8 bits, the first one lowest, as fp32.
template <bool kFp8>
__device__ __forceinline__ void widen_codes(std::uint32_t codes, float (&x)[4]) {
  if constexpr (kFp8) {
    std::uint32_t halves[2];  // fp16 holds every code
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(halves[0]), "=r"(halves[1])
        : "r"(codes));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = half_of<__half>(halves[i / 2], i % 2 != 0);
  } else {
    // 2^23 + 128 + code, whose lowest byte is the code with its sign turned over.
    const std::uint32_t turned = codes ^ 0x80808080U;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] =
          __fadd_rn(__uint_as_float(__byte_perm(turned, 0x4b000000U, 0x7440U + static_cast<unsigned>(i))), -8388736.0F);
    }
  }
}

// Two of them, the lower bytes of `codes`.
template <bool kFp8>
__device__ __forceinline__ void widen_codes(std::uint32_t codes, float (&x)[2]) {
  float all[4];
  widen_codes<kFp8>(codes, all);
  x[0] = all[0];
  x[1] = all[1];
}

// Four elements of four codes: each is multiplied in fp32, and the product is rounded.
template <class Element, bool kFp8>
__device__ __forceinline__ uint2 eight_bits(std::uint32_t codes, float scale) {
  using Products = cuda::Products<Element>;
  float x[4];
  widen_codes<kFp8>(codes, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], scale);
  return {Products::pack(x[0], x[1]), Products::pack(x[2], x[3])};
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

// Of a scale and a zero of codes of 4 bits, whether they are elements of which a fused product and sum may differ.
template <class Element>
__device__ __forceinline__ bool rounds_twice(std::uint32_t pair) {
  const float scale = half_of<Element>(pair, false);
  const float zero = fabsf(half_of<Element>(pair, true));
  return std::is_same_v<Element, __nv_bfloat16> ? int4_rounds_twice_to_bf16(scale, zero)
                                                : int4_rounds_twice_to_f16(scale, zero);
}

// Scales and zeros of eight neighbouring codes of 4 bits, which are worked at as they lie in their word: code i beside
// code i + 4.
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

// Two elements of the codes of 4 bits in the lowest bits of the halves of `codes`; what else these hold doesn't count.
// `exact`: rounds_twice() doesn't hold for any of the pairs.
template <class Element>
__device__ __forceinline__ std::uint32_t two_of_four_bits(std::uint32_t codes, std::uint32_t scales,
                                                          std::uint32_t zeros, bool exact) {
  constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
  constexpr std::uint32_t kMagic = kBf16 ? 0x43004300U : 0x64006400U;  // 128 or 1024, in front of a code
  if (exact) {
    std::uint32_t numbers;  // codes & 0x000f000f | kMagic, as one instruction, of which one number is in a register
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(codes), "n"(0x000f000f), "r"(kMagic));
    const std::uint32_t integers = fma_halves<Element>(numbers, kBf16 ? 0x3f803f80U : 0x3c003c00U,
                                                       kBf16 ? 0xc300c300U : 0xe400e400U);  // · 1 − 128 or 1024
    return fma_halves<Element>(integers, scales, zeros);
  }
  const auto element = [&](bool high) {
    return int4_element(static_cast<std::uint8_t>((high ? codes >> 16 : codes) & 0xfU), half_of<Element>(scales, high),
                        half_of<Element>(zeros, high));
  };
  return cuda::Products<Element>::pack(element(false), element(true));
}

// Eight codes of a word, whatever their pairs are.
template <class Element>
__device__ __forceinline__ uint4 four_bits(std::uint32_t codes, const EightPairs& pairs) {
  std::uint32_t x[4];  // of codes i and i + 4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = two_of_four_bits<Element>(codes >> 4 * i, pairs.scales[i], pairs.zeros[i], false);
  }
  return {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[0], x[1], 0x7632),
          __byte_perm(x[2], x[3], 0x7632)};
}

}  // namespace ringattn::sm90
