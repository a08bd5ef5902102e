// SPDX-License-Identifier: Apache-2.0
// Access to four channels of a row, which a lane processes at a time. A warp has a row: lane i has the four channels
// from 4i on, those 128 channels further, and so on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "base/dtype.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/widen.cuh"
#include "kernels/quant/cuda/row_params.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn::cuda {

inline constexpr int kQuadChannels = 4;
inline constexpr int kPairChannels = 32;  // channels that share a scale and a zero point in kInt4Token and kHybrid
inline constexpr int kLaneStep = 32 * kQuadChannels;  // channels from one of a lane's quads to the next

struct Quad {
  float x[4];
};

template <class Element>
__device__ __forceinline__ float rounded(float value) {
  return widen<Element>(MmaTraits<Element>::pack(value, 0.0F));
}
template <class Element>
__device__ __forceinline__ float truncated(float value) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return truncated_to_bf16(value);
  return truncated_to_f16(value);
}
template <class Element>
__device__ __forceinline__ constexpr float max_finite() {
  return std::is_same_v<Element, __nv_bfloat16> ? 0x1.fep127F : 65504.0F;
}
// Returns true if a 16-bit element is finite.
template <class Element>
__device__ __forceinline__ bool is_finite(std::uint32_t bits) {
  constexpr std::uint32_t kExponent =
      exponent_bits(std::is_same_v<Element, __nv_bfloat16> ? Dtype::kBf16 : Dtype::kF16);
  return (bits & kExponent) != kExponent;
}

template <class Element>
__device__ __forceinline__ Quad widen(uint2 raw) {
  return {{widen<Element>(raw.x), widen<Element>(raw.x >> 16), widen<Element>(raw.y), widen<Element>(raw.y >> 16)}};
}
template <class Element>
__device__ __forceinline__ uint2 narrow(const Quad& quad) {
  return {MmaTraits<Element>::pack(quad.x[0], quad.x[1]), MmaTraits<Element>::pack(quad.x[2], quad.x[3])};
}

// Elements of a row from `channel` on. Without by_four, those after the row's last channel are zeros.
__device__ __forceinline__ uint2 load_elements(const RowParams& p, const std::byte* row, int channel) {
  if (p.by_four) return *reinterpret_cast<const uint2*>(row + 2 * channel);
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(row) + channel;
  const auto at = [&](int i) { return channel + i < p.dim ? std::uint32_t{elements[i]} : 0U; };
  return {at(0) | at(1) << 16, at(2) | at(3) << 16};
}
__device__ __forceinline__ void store_elements(const RowParams& p, std::byte* row, int channel, uint2 raw) {
  if (p.by_four) {
    *reinterpret_cast<uint2*>(row + 2 * channel) = raw;
    return;
  }
  auto* const elements = reinterpret_cast<std::uint16_t*>(row) + channel;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (channel + i < p.dim) elements[i] = static_cast<std::uint16_t>((i < 2 ? raw.x : raw.y) >> i % 2 * 16);
  }
}

// Four 8-bit values, the first one in the lowest byte.
__device__ __forceinline__ std::uint32_t load_quantized(const RowParams& p, const std::byte* row, int channel) {
  if (p.by_four) return *reinterpret_cast<const std::uint32_t*>(row + channel);
  std::uint32_t quantized = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (channel + i < p.dim) quantized |= static_cast<std::uint32_t>(row[channel + i]) << 8 * i;
  }
  return quantized;
}
__device__ __forceinline__ void store_quantized(const RowParams& p, std::byte* row, int channel,
                                                std::uint32_t quantized) {
  if (p.by_four) {
    *reinterpret_cast<std::uint32_t*>(row + channel) = quantized;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (channel + i < p.dim) row[channel + i] = static_cast<std::byte>(quantized >> 8 * i);
  }
}
// Four 4-bit values. Rows have whole quads of them.
__device__ __forceinline__ std::uint32_t load_nibbles(const RowParams& p, const std::byte* row, int channel) {
  const std::byte* const at = row + channel / 2;
  if (p.by_four) return *reinterpret_cast<const std::uint16_t*>(at);
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8;
}
__device__ __forceinline__ void store_nibbles(const RowParams& p, std::byte* row, int channel,
                                              std::uint32_t quantized) {
  std::byte* const at = row + channel / 2;
  if (p.by_four) {
    *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(quantized);
    return;
  }
  at[0] = static_cast<std::byte>(quantized);
  at[1] = static_cast<std::byte>(quantized >> 8);
}
// A 32-bit word of a stream. Streams are byte-aligned. Words are aligned only if by_four is set.
__device__ __forceinline__ std::uint32_t load_word(const RowParams& p, const std::byte* at) {
  if (p.by_four) return *reinterpret_cast<const std::uint32_t*>(at);
  std::uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>(at[i]) << 8 * i;
  return word;
}
__device__ __forceinline__ void store_word(const RowParams& p, std::byte* at, std::uint32_t word) {
  if (p.by_four) {
    *reinterpret_cast<std::uint32_t*>(at) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(word >> 8 * i);
}
// A scale in the low half and a zero point in the high half.
__device__ __forceinline__ std::uint32_t load_pair(const RowParams& p, const std::byte* row, int pair) {
  return load_word(p, row + 4 * pair);
}
__device__ __forceinline__ void store_pair(const RowParams& p, std::byte* row, int pair, std::uint32_t qparams) {
  store_word(p, row + 4 * pair, qparams);
}
// 16-bit elements of streams without alignment: factors and outliers.
__device__ __forceinline__ std::uint32_t load_any_half(const std::byte* at) {
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8;
}
__device__ __forceinline__ void store_any_half(std::byte* at, std::uint32_t bits) {
  at[0] = static_cast<std::byte>(bits);
  at[1] = static_cast<std::byte>(bits >> 8);
}

// Converts four e4m3 values, the first one in the lowest byte.
__device__ __forceinline__ Quad e4m3_quad(std::uint32_t quantized) {
  Quad quad;
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t halves;  // fp16 represents every e4m3 value
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(quantized >> 16 * i)));
    quad.x[2 * i] = widen<__half>(halves);
    quad.x[2 * i + 1] = widen<__half>(halves >> 16);
  }
#else
  // e4m3_to_float() without its integer conversion, which is slow here. The e4m3 bits in an fp32's place are 2^-120
  // of the value. The product is exact for subnormal numbers, too.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t code = quantized >> 8 * i;
    const std::uint32_t sign = (code & 0x80U) << 24;
    const std::uint32_t magnitude = (code & 0x7fU) << 20;
    quad.x[i] = __uint_as_float(sign | magnitude) * 0x1p120F;
    if (magnitude == 0x7fU << 20) quad.x[i] = __uint_as_float(sign | 0x7fc00000U);
  }
#endif
  return quad;
}
__device__ __forceinline__ std::uint32_t quantize_e4m3(const Quad& quad) {
#if __CUDA_ARCH__ >= 890
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(quad.x[1]), "f"(quad.x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(quad.x[3]), "f"(quad.x[2]));
  return std::uint32_t{low} | std::uint32_t{high} << 16;
#else
  std::uint32_t quantized = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) quantized |= std::uint32_t{float_to_e4m3(quad.x[i])} << 8 * i;
  return quantized;
#endif
}

// Dequantizes four values without rounding to the dtype. The first value is the lowest.
__device__ __forceinline__ Quad fp8_quad(std::uint32_t quantized, float scale) {
  Quad quad = e4m3_quad(quantized);
#pragma unroll
  for (int i = 0; i < 4; ++i) quad.x[i] = quad.x[i] * scale;
  return quad;
}
__device__ __forceinline__ Quad int8_quad(std::uint32_t quantized, float scale) {
  Quad quad;
#pragma unroll
  for (int i = 0; i < 4; ++i) quad.x[i] = dequantize_int8(static_cast<std::int8_t>(quantized >> 8 * i), scale);
  return quad;
}
// Dequantizes four 4-bit values and ignores higher bits. `qparams`: scale (low half) and zero point, of each value or
// of all four.
template <class Element>
__device__ __forceinline__ Quad int4_quad(std::uint32_t quantized, const std::uint32_t (&qparams)[4]) {
  Quad quad;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    quad.x[i] = dequantize_int4(static_cast<std::uint8_t>(quantized >> 4 * i & 0xfU), widen<Element>(qparams[i]),
                                widen<Element>(qparams[i] >> 16));
  }
  return quad;
}
template <class Element>
__device__ __forceinline__ Quad int4_quad(std::uint32_t quantized, std::uint32_t qparams) {
  const std::uint32_t of_each[4] = {qparams, qparams, qparams, qparams};
  return int4_quad<Element>(quantized, of_each);
}

// Rows of a run that a warp takes one after another: a row of each head of a token, then the next token's. Only `first`
// is divided.
template <int kRows>
struct RowsOfRun {
  std::uint32_t token[kRows];  // token in the run
  std::uint32_t head[kRows];

  // Indices from `count` on repeat the last row.
  __device__ __forceinline__ RowsOfRun(std::uint32_t first, std::uint32_t count, std::uint32_t heads) {
    token[0] = first / heads;
    head[0] = first - token[0] * heads;
#pragma unroll
    for (std::uint32_t i = 1; i < kRows; ++i) {
      const bool more = first + i < count;
      const bool next_token = head[i - 1] + 1 == heads;
      token[i] = token[i - 1] + (more && next_token ? 1U : 0U);
      head[i] = !more ? head[i - 1] : next_token ? 0U : head[i - 1] + 1;
    }
  }
};

// Stores the invalid element in the cell if its location is the first. Rarely called, and by few threads.
__device__ __forceinline__ void note_invalid_element(InvalidElementCell* cell, std::uint64_t location, float value) {
  auto* const first = const_cast<volatile std::uint64_t*>(&cell->location);
  while (location < *first) {
    if (atomicCAS(&cell->lock, ~0U, 0U) != ~0U) continue;
    __threadfence();
    if (location < *first) {
      *first = location;
      *const_cast<volatile float*>(&cell->value) = value;
    }
    __threadfence();
    atomicExch(&cell->lock, ~0U);
  }
}

// Reports elements of a plain row that are not finite.
template <class Element>
__device__ __forceinline__ void check_elements(const RowParams& p, uint2 raw, int stream, std::int64_t token, int head,
                                               int channel) {
  int first = 4;
  std::uint32_t found = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const std::uint32_t bits = (i < 2 ? raw.x : raw.y) >> i % 2 * 16;
    if (is_finite<Element>(bits)) continue;
    first = i;
    found = bits;
  }
  if (first < 4)
    note_invalid_element(p.invalid, location_of_element(stream, token, head, channel + first), widen<Element>(found));
}

}  // namespace ringattn::cuda
