// SPDX-License-Identifier: Apache-2.0
// The fold state of the CUDA kernels in memory, for `rows` query rows of `heads` heads: one layout, read and written by
// folds, by the export and by the merge of states.
//
//   current    [heads, rows, head_dim_v]  A of the group that is not finished yet
//   stats [heads, rows, 8]           l of that group, as the four partial sums that a row's threads hold, and its r;
//                                      R and L of the groups before it;
//                                      flags that say which of the two parts are there
//   merged  [heads, rows, head_dim_v]  B: the groups before it, merged (kernels/merge.hpp)
//
// Columns lie in the order in which the tensor cores' fragments hold them, so that a thread's share is whole vectors. A
// state begins at a multiple of 16 bytes, and so does each part of a row.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention_params.hpp"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/merge.hpp"

namespace ringattn::cuda {

inline constexpr int kCurrentOffset = 4;  // of a row's kStateStats
inline constexpr int kMergedOffset = 5;
inline constexpr int kMergedSum = 6;
inline constexpr int kStateFlags = 7;
inline constexpr int kHasMerged = 1;  // flags in stats[kStateFlags]
inline constexpr int kHasCurrent = 2;

// Where the parts of one (head, row) are. Those whose flag isn't set hold nothing, and are never read.
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

// Where column `dim` lies: thread t of a quad holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, side by side.
__device__ __forceinline__ int fragment_offset(int dim) {
  return dim / 16 * 16 + dim % 8 / 2 * 4 + dim % 16 / 8 * 2 + dim % 2;
}

// Where column `dim` of head_dim_v ones lies; fragments are 16 columns wide, so 8 that are left over stay in order.
__device__ __forceinline__ int state_column(int dim, int head_dim_v) {
  return dim / 16 * 16 + 16 <= head_dim_v ? fragment_offset(dim) : dim;
}

// The merge step of the tensor-core kernels, whose softmax_offsets are in units of `log2_factor` powers of two.
__device__ __forceinline__ MergeStep merge_partials(float merged_offset, float merged_sum, float softmax_offset,
                                                    float sum, float log2_factor) {
  return merge_step(merged_offset, merged_sum, softmax_offset, sum, log2_factor,
                    [](float x) { return exp2_approx(x); });
}

// Sums of outputs: as red.global.add adds them, stats below the normal ones are zero.
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
// Scales what add_flushed() has added, or what had nothing to be added to: a · b is the same whether a came from 0 + a,
// also for −0 and subnormal stats. A subnormal b counts as 0.
__device__ __forceinline__ float scale_flushed(float a, float b) {
  float product;
  asm("fma.rn.ftz.f32 %0, %1, %2, 0f00000000;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

}  // namespace ringattn::cuda
