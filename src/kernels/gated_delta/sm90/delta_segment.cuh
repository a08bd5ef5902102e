// SPDX-License-Identifier: Apache-2.0
// Segments of a launch, and tiles of a chunk.
#pragma once

#include <cuda_bf16.h>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/gated_delta/sm90/delta_params.hpp"

namespace ringattn::sm90 {

struct DeltaSegment {
  std::int64_t index;      // among the task's segments
  std::int64_t in_launch;  // among the launch's segments
  std::int64_t row;
  int tokens;
  bool from_zero;  // the state before it is zero and not stored
  bool needs_state, needs_transition;

  __device__ __forceinline__ int chunks() const { return (tokens + kDeltaChunk - 1) / kDeltaChunk; }
  __device__ __forceinline__ int tokens_of(int chunk) const {
    const int left = tokens - chunk * kDeltaChunk;
    return left < kDeltaChunk ? left : kDeltaChunk;
  }
};

__device__ __forceinline__ DeltaSegment delta_segment(const DeltaParams& p, std::int64_t nth) {
  const std::int64_t index = p.first_segment + nth;
  int low = 0;
  int high = p.run_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.runs[middle].segment <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const DeltaRunEntry& run = p.runs[low];
  const std::int64_t begin = (index - run.segment) * kSegmentTokens;
  const std::int64_t left = run.tokens - begin;
  const bool from_zero = begin == 0 && run.initial == nullptr;
  const bool needs_state = left > kSegmentTokens || run.final != nullptr;
  return {
      index,     nth,         run.row + begin,          static_cast<int>(left < kSegmentTokens ? left : kSegmentTokens),
      from_zero, needs_state, needs_state && !from_zero};
}

// Rows of a chunk of a head of a bf16 tensor.
__device__ __forceinline__ cuda::RowsOf delta_rows(const DeltaTensor& tensor, std::int64_t row, int head) {
  return {static_cast<const char*>(tensor.data) + (row * tensor.token_stride + head * tensor.head_stride) * 2,
          tensor.token_stride * 2};
}

__device__ __forceinline__ float delta_number(const DeltaTensor& tensor, std::int64_t row, int head) {
  return static_cast<const float*>(tensor.data)[row * tensor.token_stride + head * tensor.head_stride];
}

// A chunk of a value head, among those of the launch.
__device__ __forceinline__ std::int64_t delta_chunk_index(const DeltaParams& p, const DeltaSegment& segment, int head,
                                                          int chunk) {
  return (segment.in_launch * p.value_heads + head) * kDeltaChunksOfSegment + chunk;
}

__device__ __forceinline__ std::int64_t delta_state_offset(const DeltaParams& p, const DeltaSegment& segment,
                                                           int head) {
  return (segment.index * p.value_heads + head) * kDeltaStateFloats;
}

__device__ __forceinline__ float2 unpack_bf16(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  return cuda::MmaTraits<__nv_bfloat16>::pack(low, high);
}

}  // namespace ringattn::sm90
