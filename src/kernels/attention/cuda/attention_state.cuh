// SPDX-License-Identifier: Apache-2.0
// A saved attention state in device memory: its layout, its merge and the softmax epilogue of a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

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

// The merge step (kernels/attention/merge.hpp) in the arithmetic of the tensor-core kernels and of sm80_simt, and the
// final partial of a saved row.

// Tensor-core kernels.
struct TensorArithmetic {
  static __device__ __forceinline__ MergeStep merge(float merged_offset, float merged_sum, float softmax_offset,
                                                    float sum, float log2_factor) {
    return merge_partials(merged_offset, merged_sum, softmax_offset, sum, log2_factor);
  }
  // Merges one element of A into B. If the softmax_offset stays, state_scale is 1 and changes nothing that the addition
  // would not flush as well.
  static __device__ __forceinline__ float join(float merged, float current, const MergeStep& step) {
    return add_flushed(multiply_flushed(merged, step.state_scale), multiply_flushed(current, step.partial_scale));
  }
};

// The fp32 kernel (simt.cu).
struct SimtArithmetic {
  // The weight 2^x of a score at distance x ≤ kMergeRescaleThreshold from its softmax_offset: 0 for −∞, NaN for NaN.
  // The weight of a finite score is never 0, as in exact arithmetic, so that ∞ in V gives ∞ and not 0 · ∞.
  static __device__ __forceinline__ float weight(float x) {
    if (x == -INFINITY) return 0.0F;
    return exp2f(x < -100.0F ? -100.0F : x);
  }
  static __device__ __forceinline__ MergeStep merge(float merged_offset, float merged_sum, float softmax_offset,
                                                    float sum, float log2_factor) {
    return merge_step(merged_offset, merged_sum, softmax_offset, sum, log2_factor, [](float x) { return weight(x); });
  }
  static __device__ __forceinline__ float join(float merged, float current, const MergeStep& step) {
    return __fmaf_rn(current, step.partial_scale, __fmul_rn(merged, step.state_scale));
  }
};

// The partial of all that a saved row has attended to: its current KV split merged into those before it.
template <class Arithmetic>
struct WholeRow {
  SavedPtrs state_ptrs;
  bool merged, current;
  float softmax_offset, sum;  // −∞ and 0 if the row attended to nothing
  MergeStep step;             // set if both partials are present

  __device__ __forceinline__ WholeRow(const SavedPtrs& at, float log2_factor)
      : state_ptrs(at), softmax_offset(-INFINITY), sum(0.0F) {
    const float* stats = state_ptrs.stats;
    const int flags = static_cast<int>(stats[kStateFlags]);
    merged = (flags & kHasMerged) != 0;
    current = (flags & kHasCurrent) != 0;
    if (current) {
      softmax_offset = stats[kCurrentOffset];
      sum = __fadd_rn(__fadd_rn(stats[0], stats[1]), __fadd_rn(stats[2], stats[3]));
    }
    if (!merged) return;
    if (current) {
      step = Arithmetic::merge(stats[kMergedOffset], stats[kMergedSum], softmax_offset, sum, log2_factor);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
    } else {
      softmax_offset = stats[kMergedOffset];
      sum = stats[kMergedSum];
    }
  }

  __device__ __forceinline__ bool any() const { return merged || current; }
  // The unnormalized output in column `column` of the state.
  __device__ __forceinline__ float output(int column) const {
    if (!merged) return current ? state_ptrs.current[column] : 0.0F;
    return current ? Arithmetic::join(state_ptrs.merged[column], state_ptrs.current[column], step)
                   : state_ptrs.merged[column];
  }
};

// Softmax epilogue of a row after its last key: adds the sink, and computes the normalization and the log-sum-exp.
// softmax_offsets are in natural units of the scaled scores.

struct RowEnd {
  float softmax_offset;
  float sum;     // Σ exp(x − softmax_offset), with the sink's term
  float weight;  // exp(old softmax_offset − new one); the outputs are multiplied by it first

  __device__ __forceinline__ float lse() const { return __fadd_rn(softmax_offset, logf(sum)); }
  // If the row attends to nothing, O is 0 and the LSE is log 0 = −∞.
  __device__ __forceinline__ float divisor() const { return sum == 0.0F ? 1.0F : sum; }
  // weight / divisor as one factor.
  __device__ __forceinline__ float factor() const { return __fmul_rn(weight, __frcp_rn(divisor())); }
};

// `sink` is the head's sink logit or null. It acts as one more score without a value. `exp` computes the row's weight.
template <class Exp>
__device__ __forceinline__ RowEnd end_row(float softmax_offset, float sum, const float* sink, Exp exp) {
  RowEnd end{softmax_offset, sum, 1.0F};
  if (sink == nullptr) return end;
  const float logit = *sink;
  end.softmax_offset = logit > softmax_offset || logit != logit ? logit : softmax_offset;
  const float finite = end.softmax_offset == -INFINITY ? 0.0F : end.softmax_offset;
  end.weight = exp(__fsub_rn(softmax_offset, finite));
  end.sum = __fmaf_rn(sum, end.weight, expf(__fsub_rn(logit, finite)));
  return end;
}

// end_row() of the tensor-core kernels.
__device__ __forceinline__ RowEnd end_row(float softmax_offset, float sum, const float* sink) {
  return end_row(softmax_offset, sum, sink, [](float x) { return expf(x); });
}

}  // namespace ringattn::cuda
