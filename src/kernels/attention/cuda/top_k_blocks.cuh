// SPDX-License-Identifier: Apache-2.0
// Device code shared by the kernels that choose KV blocks (block_choice.cu, block_mask_choice.cu): means, products of
// means, and top-k selection by score, in the summation order of kernels/attention/block_score.hpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/block_score.hpp"

namespace ringattn::cuda {

template <class Element>
__device__ __forceinline__ float number_at(const void* data, std::int64_t index) {
  return static_cast<float>(static_cast<const Element*>(data)[index]);
}

// Adds at(0) … at(rows − 1) to `sum`, one after another.
template <class At>
__device__ __forceinline__ float sum_of_rows(float sum, std::int64_t rows, At at) {
#pragma unroll 8
  for (std::int64_t i = 0; i < rows; ++i) sum = __fadd_rn(sum, at(i));
  return sum;
}
__device__ __forceinline__ float mean_of_rows(float sum, std::int64_t rows) {
  return __fmul_rn(sum, __fdiv_rn(1.0F, static_cast<float>(rows)));
}

// The sum of mean_product() over the lanes' partial sums.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int half = kScoreLanes / 2; half > 0; half /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, half));
  return x;
}

inline constexpr int kChooseThreads = 1024;

// Number of threads before this one with `yes`, and of all threads. Called by all threads of the block.
struct Ranks {
  int before, all;
};
__device__ __forceinline__ Ranks ranks_of(bool yes, int* of_warps) {
  const unsigned votes = __ballot_sync(0xffffffffU, yes);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();
  if (lane == 0) of_warps[warp] = __popc(votes);
  __syncthreads();
  const int own = of_warps[lane];  // there are as many warps as lanes
  const int before = __reduce_add_sync(0xffffffffU, lane < warp ? own : 0);
  return {before + __popc(votes & ((1U << lane) - 1U)), static_cast<int>(__reduce_add_sync(0xffffffffU, own))};
}

// Sum over all threads of the block. `of_warps` must differ from the buffer of the previous sum.
__device__ __forceinline__ int sum_of_block(int own, int* of_warps) {
  const int of_warp = static_cast<int>(__reduce_add_sync(0xffffffffU, own));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return static_cast<int>(__reduce_add_sync(0xffffffffU, of_warps[threadIdx.x % 32]));
}

// choose_best() with kChooseThreads threads: order_at(i) is the sort key of block i of `blocks`. Each thread handles
// every kChooseThreads-th block and keeps its first kKept sort keys in registers.
template <class OrderAt>
__device__ __forceinline__ void choose_best(OrderAt order_at, int blocks, int first, int count, std::int32_t* to) {
  static_assert(kChooseThreads == 32 * 32);
  constexpr int kKept = 4;
  __shared__ int of_warps[2][32];
  const int thread = static_cast<int>(threadIdx.x);
  if (count == blocks) {
    for (int i = thread; i < count; i += kChooseThreads) to[i] = first + i;
    return;
  }
  std::uint32_t kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int block = thread + i * kChooseThreads;
    kept[i] = block < blocks ? order_at(block) : 0;
  }
  // Finds the count-th highest sort key bit by bit. None is 0.
  std::uint32_t limit = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint32_t tried = limit | 1U << bit;
    int at_least = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) at_least += kept[i] >= tried ? 1 : 0;
#pragma unroll 1
    for (int block = thread + kKept * kChooseThreads; block < blocks; block += kChooseThreads) {
      at_least += order_at(block) >= tried ? 1 : 0;
    }
    if (sum_of_block(at_least, of_warps[bit & 1]) >= count) limit = tried;
  }
  // Takes the blocks above the limit, and the first of those equal to it.
  int above = 0;
#pragma unroll 1
  for (int block = thread; block < blocks; block += kChooseThreads) above += order_at(block) > limit ? 1 : 0;
  int left = count - sum_of_block(above, of_warps[1]);
  int written = 0;
  for (int base = 0; base < blocks; base += kChooseThreads) {
    const int block = base + thread;
    const std::uint32_t order = block < blocks ? order_at(block) : 0;
    const bool equal = block < blocks && order == limit;
    const Ranks equals = ranks_of(equal, of_warps[0]);
    const bool takes = block < blocks && (order > limit || (equal && equals.before < left));
    const Ranks taken = ranks_of(takes, of_warps[1]);
    if (takes) to[written + taken.before] = first + block;
    left -= equals.all;
    written += taken.all;
  }
}

template <class With>
void for_dtype(Dtype dtype, With with) {
  if (dtype == Dtype::kF32) return with(float{});
  if (dtype == Dtype::kF16) return with(__half{});
  with(__nv_bfloat16{});
}

}  // namespace ringattn::cuda
