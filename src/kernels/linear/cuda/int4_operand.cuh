// SPDX-License-Identifier: Apache-2.0
// A fragments of int4 weights, formed exactly in bf16 or fp16 (quantized_params.hpp has the packed layout).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/linear/cuda/quantized_params.hpp"

namespace ringattn::cuda {

// A number whose last mantissa bit has the value 1: 128 in bf16, 1024 in fp16. OR-ing q into it adds q.
template <class Element>
inline constexpr std::uint32_t kInt4Magic = std::is_same_v<Element, __half> ? 0x6400U : 0x4300U;

template <class Element>
__device__ __forceinline__ std::uint32_t subtract_pair(std::uint32_t x, std::uint32_t y) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 difference = __hsub2(*reinterpret_cast<__half2*>(&x), *reinterpret_cast<__half2*>(&y));
    return *reinterpret_cast<const std::uint32_t*>(&difference);
  } else {
    const __nv_bfloat162 difference =
        __hsub2(*reinterpret_cast<__nv_bfloat162*>(&x), *reinterpret_cast<__nv_bfloat162*>(&y));
    return *reinterpret_cast<const std::uint32_t*>(&difference);
  }
}

__device__ __forceinline__ std::uint32_t load_shared_byte(std::uint32_t address) {
  std::uint16_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=h"(byte) : "r"(address) : "memory");
  return byte;
}

// Twice the magic number plus the zero of a row.
template <class Element>
__device__ __forceinline__ std::uint32_t int4_zero_pair(std::uint32_t zero) {
  return (kInt4Magic<Element> + zero) * 0x10001U;
}

// The fragment q − zero of one step of 16 elements. zeros: pairs of this thread's two rows.
template <class Element>
__device__ __forceinline__ void int4_operand(std::uint32_t (&a)[4], std::uint32_t codes,
                                             const std::uint32_t (&zeros)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // (codes & mask) | magic in one instruction, which the compiler makes two of.
    std::uint32_t number;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(number)
        : "r"(codes >> (4 * i)), "r"(0x000f000fU), "r"(kInt4Magic<Element> * 0x10001U));
    a[i] = subtract_pair<Element>(number, zeros[i % 2]);
  }
}

__device__ __forceinline__ const char* int4_block(const Int4Gemm& p, int matrix, int row_tile, int group) {
  const std::int64_t row_tiles = int4_row_tiles(p.out.columns);
  return p.packed + ((matrix * row_tiles + row_tile) * p.groups + p.first_group + group) * kInt4BlockBytes;
}

}  // namespace ringattn::cuda
