// SPDX-License-Identifier: Apache-2.0
// Elements of tensors whose dtype is known when a kernel runs, as fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/common/cuda/widen.cuh"

namespace ringattn::cuda {

// `dtype` is a ringattn::Dtype. `index` counts elements.
__device__ inline float load_from(const void* data, int dtype, std::int64_t index) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      return static_cast<const float*>(data)[index];
    case Dtype::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return __half2float(static_cast<const __half*>(data)[index]);
  }
}
__device__ inline void store_to(void* data, int dtype, std::int64_t index, float value) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      static_cast<float*>(data)[index] = value;
      break;
    case Dtype::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}
__device__ inline float round_to(int dtype, float value) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      return value;
    case Dtype::kBf16:
      return __bfloat162float(__float2bfloat16_rn(value));
    default:
      return __half2float(__float2half_rn(value));
  }
}

// Consecutive elements of a row that a thread loads at once. `aligned`: to 16 bytes.
inline constexpr int kPieceElements = 8;

template <class Element>
__device__ __forceinline__ void load_piece(const char* from, bool aligned, float (&x)[kPieceElements]) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    const auto* floats = reinterpret_cast<const float*>(from);
    if (aligned) {
      const float4 low = *reinterpret_cast<const float4*>(floats), high = *reinterpret_cast<const float4*>(floats + 4);
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) x[i] = floats[i];
    }
  } else {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
    if (aligned) {
      const uint4 pairs = *reinterpret_cast<const uint4*>(from);
      const std::uint32_t words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) x[i] = widen<Element>(words[i / 2] >> i % 2 * 16);
    } else {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) x[i] = widen<Element>(halves[i]);
    }
  }
}

}  // namespace ringattn::cuda
