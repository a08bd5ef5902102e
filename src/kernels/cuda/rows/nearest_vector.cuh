// SPDX-License-Identifier: Apache-2.0
// Which vector of a codebook is nearest to a point, with the host's distances and the host's choice among equals.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/row_quantization.hpp"

namespace ringattn::cuda {

// Vectors that are compared among themselves before their nearest is with those before.
inline constexpr int kVectorsTogether = 16;
static_assert(kCodebookVectors % kVectorsTogether == 0);

// A codebook's vectors lie in shared memory in fp32, [256, width], aligned to a vector's size or 16 bytes.
template <int kWidth>
__device__ __forceinline__ void load_vector(const float* from, float (&to)[kWidth]) {
  if constexpr (kWidth == 2) {
    const float2 both = *reinterpret_cast<const float2*>(from);
    to[0] = both.x;
    to[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  }
}

// For kPoints of a thread's points at once, which share what is read of the vectors. Numbers are finite; distances may
// be ∞.
template <int kWidth, int kPoints>
__device__ __forceinline__ void find_nearest(const float* vectors, const float (&points)[kPoints][kWidth],
                                             int (&found)[kPoints]) {
  float least[kPoints];
#pragma unroll 1
  for (int first = 0; first < kCodebookVectors; first += kVectorsTogether) {
    float among[kPoints];
#pragma unroll
    for (int v = 0; v < kVectorsTogether; ++v) {
      float vector[kWidth];
      load_vector<kWidth>(vectors + (first + v) * kWidth, vector);
#pragma unroll
      for (int i = 0; i < kPoints; ++i) {
        const float distance = squared_distance(points[i], vector, kWidth);
        among[i] = v == 0 ? distance : fminf(among[i], distance);
      }
    }
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      const bool nearer = first == 0 || among[i] < least[i];
      least[i] = nearer ? among[i] : least[i];
      found[i] = nearer ? first : found[i];
    }
  }
  // The first of those together that is as near.
#pragma unroll
  for (int i = 0; i < kPoints; ++i) {
    const int first = found[i];
#pragma unroll 4
    for (int v = kVectorsTogether - 1; v >= 0; --v) {
      float vector[kWidth];
      load_vector<kWidth>(vectors + (first + v) * kWidth, vector);
      if (squared_distance(points[i], vector, kWidth) == least[i]) found[i] = first + v;
    }
  }
}

}  // namespace ringattn::cuda
