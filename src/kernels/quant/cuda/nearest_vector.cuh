// SPDX-License-Identifier: Apache-2.0
// Nearest codebook vector to a point, with the host's distances and the host's choice among equal distances.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/quant/row_quantization.hpp"

namespace ringattn::cuda {

// Vectors per step. Their minimum distance is compared with that of the steps before.
inline constexpr int kVectorsPerStep = 16;
static_assert(kCodebookVectors % kVectorsPerStep == 0);

// Loads a vector of a codebook in shared memory, [256, width] in fp32, aligned to a vector's size or 16 bytes.
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

// Finds the nearest vectors of kPoints points, which share the loads of the vectors. Elements are finite, but distances
// may be ∞.
template <int kWidth, int kPoints>
__device__ __forceinline__ void find_nearest(const float* vectors, const float (&points)[kPoints][kWidth],
                                             int (&found)[kPoints]) {
  float min_distance[kPoints];
#pragma unroll 1
  for (int first = 0; first < kCodebookVectors; first += kVectorsPerStep) {
    float step_min[kPoints];
#pragma unroll
    for (int v = 0; v < kVectorsPerStep; ++v) {
      float vector[kWidth];
      load_vector<kWidth>(vectors + (first + v) * kWidth, vector);
#pragma unroll
      for (int i = 0; i < kPoints; ++i) {
        const float distance = squared_distance(points[i], vector, kWidth);
        step_min[i] = v == 0 ? distance : fminf(step_min[i], distance);
      }
    }
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      const bool nearer = first == 0 || step_min[i] < min_distance[i];
      min_distance[i] = nearer ? step_min[i] : min_distance[i];
      found[i] = nearer ? first : found[i];
    }
  }
  // The first vector of the nearest step with the minimum distance.
#pragma unroll
  for (int i = 0; i < kPoints; ++i) {
    const int first = found[i];
#pragma unroll 4
    for (int v = kVectorsPerStep - 1; v >= 0; --v) {
      float vector[kWidth];
      load_vector<kWidth>(vectors + (first + v) * kWidth, vector);
      if (squared_distance(points[i], vector, kWidth) == min_distance[i]) found[i] = first + v;
    }
  }
}

}  // namespace ringattn::cuda
