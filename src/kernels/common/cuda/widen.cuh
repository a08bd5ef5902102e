// SPDX-License-Identifier: Apache-2.0
// Conversion of 16-bit elements to fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ringattn::cuda {

// Converts the low 16 bits and ignores the others.
template <class Element>
__device__ __forceinline__ float widen(std::uint32_t bits) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __uint_as_float(bits << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
}

}  // namespace ringattn::cuda
