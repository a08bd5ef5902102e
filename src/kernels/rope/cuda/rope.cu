// SPDX-License-Identifier: Apache-2.0
// A CTA has a tile of tokens with all heads of q and k. Its threads first compute cos and sin of the tile's tokens and
// pairs into shared memory, while their first rows are on the way, and then rotate the rows unit by unit.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/rope/cuda/cuda_rope.hpp"
#include "kernels/rope/rope_angle.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kRopeThreads = 256;
// Loads that a thread issues together. With 4 the registers leave two CTAs on a multiprocessor, which is slower.
constexpr int kUnitsInFlight = 2;

__device__ float to_float(float value) { return value; }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float to_float(__half value) { return __half2float(value); }

// Rounds to nearest even. NaN becomes the one that host kernels store.
__device__ void store_rounded(float value, float& to) { to = isnan(value) ? __uint_as_float(0x7fc00000U) : value; }
__device__ void store_rounded(float value, __nv_bfloat16& to) {
  to = isnan(value) ? __ushort_as_bfloat16(0x7fc0U) : __float2bfloat16_rn(value);
}
__device__ void store_rounded(float value, __half& to) {
  to = isnan(value) ? __ushort_as_half(0x7e00U) : __float2half_rn(value);
}

__device__ std::int64_t position_of(const RopeParams& p, std::int64_t token, int axis) {
  if (p.positions == nullptr) return p.first + token;
  const std::int64_t at = axis * p.axis_stride + token;
  if (p.is_int64) return static_cast<const std::int64_t*>(p.positions)[at];
  return static_cast<const std::int32_t*>(p.positions)[at];
}

// kCount elements that are loaded and stored together: 16 bytes, or one element.
template <class Element, int kCount>
struct alignas(kCount * sizeof(Element)) Elements {
  Element of[kCount];
};

// Where a unit of the tile is. A rotating unit has kCount pairs, whose elements are two vectors; another one copies
// one vector.
template <class Element, int kCount, bool kInterleaved>
struct Unit {
  using Vector = Elements<Element, kCount>;

  Vector first, second;
  Element* to = nullptr;  // null: there is no such unit
  int token = 0;          // of the tile
  int pair = 0;           // −1: a copy

  // Elements from the first vector to the second.
  static __device__ int distance(const RopeParams& p) { return kInterleaved ? kCount : p.pairs; }

  __device__ void load(const RopeParams& p, std::int64_t tile, int number, int count) {
    to = nullptr;
    if (number >= count) return;
    const int row = p.by_units.quotient(number);
    const int unit = number - row * p.units;
    token = p.by_heads.quotient(row);
    int head = row - token * p.heads;
    const bool is_first = head < p.first_heads;
    const RopeRows& rows = p.rows[is_first ? 0 : 1];
    if (!is_first) head -= p.first_heads;
    const bool turns = unit < p.turned;
    pair = turns ? unit * kCount : -1;
    const int column = turns ? (kInterleaved ? 2 : 1) * unit * kCount : p.rotary_dim + (unit - p.turned) * kCount;
    const Element* const from =
        static_cast<const Element*>(rows.x) + (tile + token) * rows.x_token_stride + head * rows.x_head_stride + column;
    to = static_cast<Element*>(rows.y) + (tile + token) * rows.y_token_stride + head * rows.y_head_stride + column;
    first = *reinterpret_cast<const Vector*>(from);
    if (turns) second = *reinterpret_cast<const Vector*>(from + distance(p));
  }

  // cos, sin: [tile_tokens, pairs]
  __device__ void store(const RopeParams& p, const float* cos, const float* sin) {
    if (to == nullptr) return;
    if (pair >= 0) {
      const int at = token * p.pairs + pair;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float c = cos[at + i], s = sin[at + i];
        Element& a = kInterleaved ? element(2 * i) : first.of[i];
        Element& b = kInterleaved ? element(2 * i + 1) : second.of[i];
        const float x = to_float(a), y = to_float(b);
        store_rounded(__fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s)), a);
        store_rounded(__fadd_rn(__fmul_rn(y, c), __fmul_rn(x, s)), b);
      }
      *reinterpret_cast<Vector*>(to + distance(p)) = second;
    }
    *reinterpret_cast<Vector*>(to) = first;
  }

 private:
  __device__ Element& element(int i) { return i < kCount ? first.of[i] : second.of[i - kCount]; }
};

template <class Element, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  extern __shared__ float angles[];  // cos [tile_tokens, pairs], sin [tile_tokens, pairs]
  float* const cos = angles;
  float* const sin = angles + p.tile_tokens * p.pairs;
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * p.tile_tokens;
  const int tokens = static_cast<int>(min(static_cast<std::int64_t>(p.tile_tokens), p.tokens - tile));
  const int count = tokens * p.heads * p.units;
  const int thread = static_cast<int>(threadIdx.x);

  Unit<Element, kCount, kInterleaved> units[kUnitsInFlight];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) units[i].load(p, tile, begin + i * kRopeThreads + thread, count);
  };
  load(0);
  for (int i = thread; i < tokens * p.pairs; i += kRopeThreads) {
    const int token = p.by_pairs.quotient(i);
    const int pair = i - token * p.pairs;
    const SinCos value = sin_cos(rope_angle(position_of(p, tile + token, p.axes[pair]), p.frequencies[pair], p.exact));
    cos[i] = __fmul_rn(value.cos, p.factor);
    const float turned = __fmul_rn(value.sin, p.factor);
    sin[i] = p.inverse ? -turned : turned;
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
  Kernel aligned, any;
};

template <class Element>
RopeKernels rope_kernels_of(RopePairs pairs) {
  constexpr int kCount = 16 / sizeof(Element);
  if (pairs == RopePairs::kInterleaved) return {rope_kernel<Element, kCount, true>, rope_kernel<Element, 1, true>};
  return {rope_kernel<Element, kCount, false>, rope_kernel<Element, 1, false>};
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
  load_kernel(kernels.aligned);
  load_kernel(kernels.any);
}

void launch_rope(const RopeParams& params, Dtype dtype, RopePairs pairs, bool aligned, cudaStream_t stream) {
  const RopeKernels kernels = rope_kernels_of(dtype, pairs);
  const std::int64_t tiles = (params.tokens + params.tile_tokens - 1) / params.tile_tokens;
  const std::size_t shared = 2 * sizeof(float) * static_cast<std::size_t>(params.tile_tokens * params.pairs);
  const Kernel kernel = aligned ? kernels.aligned : kernels.any;
  kernel<<<static_cast<unsigned>(tiles), kRopeThreads, shared, stream>>>(params);
  check_cuda(cudaGetLastError(), "cuda_rope");
}

}  // namespace ringattn::cuda
