// SPDX-License-Identifier: Apache-2.0
// A lane's adjacent elements of a row of states, A, B or C, loaded and stored as one vector where they are aligned.
// Used by the update kernels.
#pragma once

#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

struct Vec4 {
  float v[kUpdateWidth];
};

template <bool kAligned>
__device__ __forceinline__ Vec4 load_state(const float* at) {
  if constexpr (kAligned) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    return {{four.x, four.y, four.z, four.w}};
  }
  return {{at[0], at[1], at[2], at[3]}};
}
template <bool kAligned>
__device__ __forceinline__ void store_state(float* at, const Vec4& four) {
  if constexpr (kAligned) {
    *reinterpret_cast<float4*>(at) = make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kUpdateWidth; ++i) at[i] = four.v[i];
  }
}

template <class Element>
struct alignas(kUpdateWidth * sizeof(Element)) Elements {
  Element v[kUpdateWidth];
};
template <bool kAligned, class Element>
__device__ __forceinline__ Elements<Element> load_elements(const Element* at) {
  if constexpr (kAligned) return *reinterpret_cast<const Elements<Element>*>(at);
  return {{at[0], at[1], at[2], at[3]}};
}

}  // namespace ringattn::cuda
