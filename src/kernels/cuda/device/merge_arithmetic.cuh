// SPDX-License-Identifier: Apache-2.0
// The merge step (kernels/merge.hpp) as the two kinds of CUDA fold kernels compute it, and what a saved row comes to.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/attention_state.cuh"

namespace ringattn::cuda {

// Kernels on tensor cores.
struct TensorArithmetic {
  static __device__ __forceinline__ MergeStep merge(float merged_offset, float merged_sum, float softmax_offset,
                                                    float sum, float log2_factor) {
    return merge_partials(merged_offset, merged_sum, softmax_offset, sum, log2_factor);
  }
  // One element of B, which A's joins. Where the softmax_offset stays, `kept` is 1 and changes nothing that the
  // addition would not flush as well.
  static __device__ __forceinline__ float join(float merged, float current, const MergeStep& step) {
    return add_flushed(multiply_flushed(merged, step.state_scale), multiply_flushed(current, step.partial_scale));
  }
};

// The kernel in fp32 (simt.cu).
struct SimtArithmetic {
  // The weight 2^x of a score that lies x ≤ kMergeRescaleThreshold from its softmax_offset: 0 for −∞, NaN for NaN. A
  // finite score never weighs 0, as in exact arithmetic: ∞ in V gives ∞ and not 0 · ∞.
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

// All that a saved row has folded, its current group merged into those before it.
template <class Arithmetic>
struct WholeRow {
  SavedPtrs state_ptrs;
  bool merged, current;
  float softmax_offset, sum;  // −∞ and 0 where nothing was folded
  MergeStep step;             // where both are there

  __device__ __forceinline__ WholeRow(const SavedPtrs& at, float log2_factor)
      : state_ptrs(at), softmax_offset(-INFINITY), sum(0.0F) {
    const float* n = state_ptrs.stats;
    const int parts = static_cast<int>(n[kStateFlags]);
    merged = (parts & kHasMerged) != 0;
    current = (parts & kHasCurrent) != 0;
    if (current) {
      softmax_offset = n[kCurrentOffset];
      sum = __fadd_rn(__fadd_rn(n[0], n[1]), __fadd_rn(n[2], n[3]));
    }
    if (!merged) return;
    if (current) {
      step = Arithmetic::merge(n[kMergedOffset], n[kMergedSum], softmax_offset, sum, log2_factor);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
    } else {
      softmax_offset = n[kMergedOffset];
      sum = n[kMergedSum];
    }
  }

  __device__ __forceinline__ bool any() const { return merged || current; }
  // The output at state_ptrs `column`, not normalised.
  __device__ __forceinline__ float output(int column) const {
    if (!merged) return current ? state_ptrs.current[column] : 0.0F;
    return current ? Arithmetic::join(state_ptrs.merged[column], state_ptrs.current[column], step)
                   : state_ptrs.merged[column];
  }
};

}  // namespace ringattn::cuda
