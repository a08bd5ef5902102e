// SPDX-License-Identifier: Apache-2.0
// A CTA has a tile of tokens with all heads of q and k. Its threads first compute cos and sin of the tile's tokens and
// pairs into shared memory, while their first rows are being loaded, and then rotate the rows unit by unit.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/rope/cuda/cuda_rope.hpp"
#include "kernels/rope/cuda/rotation.cuh"

namespace ringattn::cuda {

namespace {

__device__ std::int64_t position_of(const RopeParams& p, std::int64_t token, int axis) {
  if (p.positions == nullptr) return p.first + token;
  const std::int64_t at = axis * p.axis_stride + token;
  if (p.is_int64) return static_cast<const std::int64_t*>(p.positions)[at];
  return static_cast<const std::int32_t*>(p.positions)[at];
}

// A unit of the tile, and its destination.
template <class Element, bool kAligned, RopePairs kPairs, int kVectors>
struct TileUnit {
  RowUnit<Element, kAligned, kPairs, kVectors> unit;
  Element* to = nullptr;  // null: there is no such unit
  int token = 0;          // of the tile

  __device__ __forceinline__ void load(const RopeParams& p, std::int64_t tile, int number, int count) {
    to = nullptr;
    if (number >= count) return;
    const int row = p.by_units.quotient(number);
    token = p.by_heads.quotient(row);
    int head = row - token * p.heads;
    const bool is_first = head < p.first_heads;
    const RopeRows& rows = p.rows[is_first ? 0 : 1];
    if (!is_first) head -= p.first_heads;
    const Element* const from =
        static_cast<const Element*>(rows.x) + (tile + token) * rows.x_token_stride + head * rows.x_head_stride;
    to = static_cast<Element*>(rows.y) + (tile + token) * rows.y_token_stride + head * rows.y_head_stride;
    unit.load(from, number - row * p.units, p.turned, p.by.pairs);
  }

  // cos, sin: [tile_tokens, pairs]
  __device__ __forceinline__ void store(const RopeParams& p, const float* cos, const float* sin) {
    if (to == nullptr) return;
    unit.rotate_and_store(to, p.by.pairs, cos + token * p.by.pairs, sin + token * p.by.pairs);
  }
};

template <class Element, bool kAligned, RopePairs kPairs, int kVectors>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  // Loads that a thread issues together. With eight of 16 bytes the registers leave two CTAs on a multiprocessor, which
  // is slower.
  constexpr int kUnitsInFlight = kPairs == RopePairs::kInterleaved && kVectors == 1 ? 4 : 2;
  extern __shared__ float angles[];  // cos [tile_tokens, pairs], sin [tile_tokens, pairs]
  float* const cos = angles;
  float* const sin = angles + p.tile_tokens * p.by.pairs;
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * p.tile_tokens;
  const int tokens = static_cast<int>(min(static_cast<std::int64_t>(p.tile_tokens), p.tokens - tile));
  const int count = tokens * p.heads * p.units;
  const int thread = static_cast<int>(threadIdx.x);

  TileUnit<Element, kAligned, kPairs, kVectors> units[kUnitsInFlight];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) units[i].load(p, tile, begin + i * kRopeThreads + thread, count);
  };
  load(0);
  for (int i = thread; i < tokens * p.by.pairs; i += kRopeThreads) {
    const int token = p.by_pairs.quotient(i);
    const int pair = i - token * p.by.pairs;
    const int axis = p.axes == nullptr ? 0 : p.axes[pair];
    const SinCos value = sin_cos_of(p.by, position_of(p, tile + token, axis), pair);
    cos[i] = value.cos;
    sin[i] = p.inverse ? -value.sin : value.sin;
  }
  __syncthreads();
  for (int begin = 0; begin < count; begin += kUnitsInFlight * kRopeThreads) {
    if (begin > 0) load(begin);
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) units[i].store(p, cos, sin);
  }
}

using Kernel = void (*)(RopeParams);
struct RopeKernels {
  Kernel wide, aligned, any;  // by the vectors of a unit: two or one of 16 bytes, or elements
};

template <class Element>
RopeKernels rope_kernels_of(RopePairs pairs) {
  if (pairs == RopePairs::kInterleaved) {
    return {rope_kernel<Element, true, RopePairs::kInterleaved, 2>,
            rope_kernel<Element, true, RopePairs::kInterleaved, 1>,
            rope_kernel<Element, false, RopePairs::kInterleaved, 1>};
  }
  const Kernel aligned = rope_kernel<Element, true, RopePairs::kHalfSplit, 1>;
  return {aligned, aligned, rope_kernel<Element, false, RopePairs::kHalfSplit, 1>};
}

RopeKernels rope_kernels_of(Dtype dtype, RopePairs pairs) {
  switch (dtype) {
    case Dtype::kF32:
      return rope_kernels_of<float>(pairs);
    case Dtype::kBf16:
      return rope_kernels_of<__nv_bfloat16>(pairs);
    default:
      return rope_kernels_of<__half>(pairs);
  }
}

}  // namespace

void load_rope(Dtype dtype, RopePairs pairs) {
  const RopeKernels kernels = rope_kernels_of(dtype, pairs);
  load_kernel(kernels.wide);
  load_kernel(kernels.aligned);
  load_kernel(kernels.any);
}

void launch_rope(const RopeParams& params, Dtype dtype, RopePairs pairs, RopeVectors vectors, cudaStream_t stream) {
  const RopeKernels kernels = rope_kernels_of(dtype, pairs);
  const std::int64_t tiles = (params.tokens + params.tile_tokens - 1) / params.tile_tokens;
  const std::size_t shared = 2 * sizeof(float) * static_cast<std::size_t>(params.tile_tokens * params.by.pairs);
  const Kernel kernel = vectors == RopeVectors::kTwo   ? kernels.wide
                        : vectors == RopeVectors::kOne ? kernels.aligned
                                                       : kernels.any;
  kernel<<<static_cast<unsigned>(tiles), kRopeThreads, shared, stream>>>(params);
  check_cuda(cudaGetLastError(), "cuda_rope");
}

}  // namespace ringattn::cuda
