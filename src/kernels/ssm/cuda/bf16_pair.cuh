// SPDX-License-Identifier: Apache-2.0
// Hi/lo pairs: fp32 factors of MMAs as the sum of two bf16 values, and conversions of packed 16-bit pairs. Used by the
// SSD kernels of sm80 and sm90.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

// Splits two fp32 values into packed bf16 values with first = hi + lo, within 2^−17.
__device__ __forceinline__ void split_hi_lo(float first, float second, std::uint32_t& hi, std::uint32_t& lo) {
  hi = MmaTraits<__nv_bfloat16>::pack(first, second);
  lo = MmaTraits<__nv_bfloat16>::pack(__fsub_rn(first, __uint_as_float(hi << 16)),
                                      __fsub_rn(second, __uint_as_float(hi & 0xffff0000U)));
}

// Products of two packed bf16 values with two hi/lo pairs, as hi/lo pairs within 3 · 2^−18. x · hi is represented
// exactly: its rounded value, and the rounding error in lo.
__device__ __forceinline__ void split_product_hi_lo(std::uint32_t x, uint2 factor, std::uint32_t& hi,
                                                    std::uint32_t& lo) {
  asm("{\n"
      ".reg .b32 rest;\n"
      "fma.rn.bf16x2 %0, %2, %3, %5;\n"
      "neg.bf16x2 rest, %0;\n"
      "fma.rn.bf16x2 rest, %2, %3, rest;\n"
      "fma.rn.bf16x2 %1, %2, %4, rest;\n"
      "}"
      : "=&r"(hi), "=r"(lo)
      : "r"(x), "r"(factor.x), "r"(factor.y), "r"(0x80008000U));
}

// Products of packed bf16 values, each rounded once. The addend is −0, which keeps the sign of a zero.
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t products;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(a), "r"(b), "r"(0x80008000U));
  return products;
}

__device__ __forceinline__ float2 unpack(std::uint32_t pair, __nv_bfloat16 /*type*/) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
}
__device__ __forceinline__ float2 unpack(std::uint32_t pair, __half /*type*/) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace ringattn::cuda
