// SPDX-License-Identifier: Apache-2.0
// fp32 factors of products as two 16-bit parts, and pairs of 16-bit elements as fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"

namespace ringattn::cuda {

// Two fp32 numbers as two pairs of bf16, whose sums they are but for 2^−17.
__device__ __forceinline__ void split_hi_lo(float first, float second, std::uint32_t& hi, std::uint32_t& lo) {
  hi = Products<__nv_bfloat16>::pack(first, second);
  lo = Products<__nv_bfloat16>::pack(__fsub_rn(first, __uint_as_float(hi << 16)),
                                     __fsub_rn(second, __uint_as_float(hi & 0xffff0000U)));
}

// Two bf16 numbers times two that are hi + lo each, as two pairs of bf16, whose sums the products are but for
// 3 · 2^−18. x · hi is exact as its rounded value and what the rounding took away.
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

// Two bf16 numbers times two others, each product rounded once. What is added is −0, so the sign of a zero stays.
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
