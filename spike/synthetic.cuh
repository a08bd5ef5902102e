// SPDX-License-Identifier: Apache-2.0
// Spike: synthetic input by Philox and exact arithmetic, the same bits on host and device. Four elements a block of
// words; each is a sum of four bytes (0 … 1020), centred, scaled by a power of two: exact in fp32, one rounding to
// bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "base/philox.hpp"

namespace ringattn {

__host__ __device__ inline float synthetic_value(std::uint64_t seed, int tensor, std::int64_t token, int head,
                                                 int dim) {
  const PhiloxWords words =
      philox4x32_10({{static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(token >> 32),
                      static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(tensor << 16 | dim / 4)}},
                    seed);
  const std::uint32_t w = words.word[dim % 4];
  const int sum = static_cast<int>((w & 255U) + (w >> 8 & 255U) + (w >> 16 & 255U) + (w >> 24)) - 510;
  return static_cast<float>(sum) * (1.0F / 128.0F);  // about N(0, 1.15)
}

__host__ __device__ inline std::uint16_t bf16_bits(float value) {
#if defined(__CUDA_ARCH__)
  const std::uint32_t bits = __float_as_uint(value);
#else
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
#endif
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

// [tokens, heads, dim] dense; token i of the tensor is token `first + i`.
__global__ void synthetic_fill(std::uint16_t* data, std::int64_t tokens, int heads, int dim, std::uint64_t seed,
                               int tensor, std::int64_t first) {
  const std::int64_t n = tokens * heads * (dim / 4);
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const int d = static_cast<int>(i % (dim / 4)) * 4;
    const int h = static_cast<int>(i / (dim / 4) % heads);
    const std::int64_t t = i / (dim / 4) / heads;
    for (int j = 0; j < 4; ++j)
      data[(t * heads + h) * dim + d + j] = bf16_bits(synthetic_value(seed, tensor, first + t, h, d + j));
  }
}

}  // namespace ringattn
