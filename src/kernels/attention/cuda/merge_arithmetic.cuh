// SPDX-License-Identifier: Apache-2.0
// The merge step (kernels/attention/merge.hpp) in the arithmetic of the tensor-core kernels and of sm80_simt, and the
// final partial of a saved row.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attention/cuda/attention_state.cuh"

namespace ringattn::cuda {

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

}  // namespace ringattn::cuda
