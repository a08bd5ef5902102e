// SPDX-License-Identifier: Apache-2.0
// Layout of a saved attention state in device memory, for `rows` query rows of `heads` heads. Attention kernels, the
// export and the merge of states read and write it.
//
//   current [heads, rows, head_dim_v]  unnormalized output A of the current KV split
//   stats   [heads, rows, 8]           of the current split: its sum l as the four partial sums of a row's threads, and
//                                      its softmax_offset r; of the merged splits: softmax_offset R and sum L;
//                                      flags that say which of the two partials are present
//   merged  [heads, rows, head_dim_v]  unnormalized output B of the splits before it, merged
//   (kernels/attention/merge.hpp)
//
// Columns are in the order of the tensor cores' accumulator fragments, so that a thread accesses whole vectors. A state
// is aligned to 16 bytes, and so is each part of a row.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

inline constexpr int kCurrentOffset = 4;  // indices into a row's kStateStats values
inline constexpr int kMergedOffset = 5;
inline constexpr int kMergedSum = 6;
inline constexpr int kStateFlags = 7;
inline constexpr int kHasMerged = 1;  // flags in stats[kStateFlags]
inline constexpr int kHasCurrent = 2;

// Addresses of the parts of one (head, row). A part whose flag isn't set is uninitialized and is never read.
template <class Number>
struct BasicStatePtrs {
  Number* current;
  Number* stats;
  Number* merged;

  __device__ __forceinline__ BasicStatePtrs(Number* state, std::int64_t rows, std::int64_t heads, int head_dim_v,
                                            std::int64_t row, std::int64_t head) {
    const std::int64_t index = head * rows + row;
    const std::int64_t all = heads * rows;
    current = state + index * head_dim_v;
    stats = state + all * head_dim_v + index * kStateStats;
    merged = current + all * (head_dim_v + kStateStats);
  }
};
using StatePtrs = BasicStatePtrs<float>;
using SavedPtrs = BasicStatePtrs<const float>;

// Offset of column `dim`: thread t of a quad holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, contiguously.
__device__ __forceinline__ int fragment_offset(int dim) {
  return dim / 16 * 16 + dim % 8 / 2 * 4 + dim % 16 / 8 * 2 + dim % 2;
}

// Offset of column `dim` of head_dim_v columns. Fragments are 16 columns wide, so a remainder of 8 columns stays in
// order.
__device__ __forceinline__ int state_column(int dim, int head_dim_v) {
  return dim / 16 * 16 + 16 <= head_dim_v ? fragment_offset(dim) : dim;
}

// The merge step of the tensor-core kernels. Their softmax_offsets are in units of `log2_factor` powers of two.
__device__ __forceinline__ MergeStep merge_partials(float merged_offset, float merged_sum, float softmax_offset,
                                                    float sum, float log2_factor) {
  return merge_step(merged_offset, merged_sum, softmax_offset, sum, log2_factor,
                    [](float x) { return exp2_approx(x); });
}

// Adds outputs as red.global.add does: subnormal numbers are flushed to zero.
__device__ __forceinline__ float add_flushed(float a, float b) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ float multiply_flushed(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}
// Scales a result of add_flushed() or an unprocessed value. a · b is the same whether or not a came from 0 + a, also
// for −0 and subnormal numbers. A subnormal b counts as 0.
__device__ __forceinline__ float scale_flushed(float a, float b) {
  float product;
  asm("fma.rn.ftz.f32 %0, %1, %2, 0f00000000;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

}  // namespace ringattn::cuda
