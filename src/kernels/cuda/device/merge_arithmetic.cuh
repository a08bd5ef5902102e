// SPDX-License-Identifier: Apache-2.0
// The merge step (kernels/merge.hpp) as the two kinds of CUDA fold kernels compute it, and what a saved row comes to.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/fold_state.cuh"

namespace ringattn::cuda {

// Kernels on tensor cores.
struct TensorArithmetic {
  static __device__ __forceinline__ MergeStep merge(float closed_reference, float closed_sum, float reference,
                                                    float sum, float unit) {
    return merge_rows(closed_reference, closed_sum, reference, sum, unit);
  }
  // One element of B, which A's joins. Where the reference stays, `kept` is 1 and changes nothing that the addition
  // would not flush as well.
  static __device__ __forceinline__ float join(float closed, float open, const MergeStep& step) {
    return add_flushed(multiply_flushed(closed, step.kept), multiply_flushed(open, step.factor));
  }
};

// The kernel in fp32 (plain.cu).
struct PlainArithmetic {
  // The weight 2^x of a score that lies x ≤ kMergeThreshold from its reference: 0 for −∞, NaN for NaN. A finite score
  // never weighs 0, as in exact arithmetic: ∞ in V gives ∞ and not 0 · ∞.
  static __device__ __forceinline__ float weight(float x) {
    if (x == -INFINITY) return 0.0F;
    return exp2f(x < -100.0F ? -100.0F : x);
  }
  static __device__ __forceinline__ MergeStep merge(float closed_reference, float closed_sum, float reference,
                                                    float sum, float unit) {
    return merge_step(closed_reference, closed_sum, reference, sum, unit, [](float x) { return weight(x); });
  }
  static __device__ __forceinline__ float join(float closed, float open, const MergeStep& step) {
    return __fmaf_rn(open, step.factor, __fmul_rn(closed, step.kept));
  }
};

// All that a saved row has folded, its open group merged into those before it.
template <class Arithmetic>
struct WholeRow {
  SavedPlace place;
  bool closed, open;
  float reference, sum;  // −∞ and 0 where nothing was folded
  MergeStep step;        // where both are there

  __device__ __forceinline__ WholeRow(const SavedPlace& at, float unit) : place(at), reference(-INFINITY), sum(0.0F) {
    const float* n = place.numbers;
    const int parts = static_cast<int>(n[kStateParts]);
    closed = (parts & kHasClosed) != 0;
    open = (parts & kHasOpen) != 0;
    if (open) {
      reference = n[kOpenReference];
      sum = __fadd_rn(__fadd_rn(n[0], n[1]), __fadd_rn(n[2], n[3]));
    }
    if (!closed) return;
    if (open) {
      step = Arithmetic::merge(n[kClosedReference], n[kClosedSum], reference, sum, unit);
      reference = step.reference;
      sum = step.sum;
    } else {
      reference = n[kClosedReference];
      sum = n[kClosedSum];
    }
  }

  __device__ __forceinline__ bool any() const { return closed || open; }
  // The output at place `column`, not normalised.
  __device__ __forceinline__ float output(int column) const {
    if (!closed) return open ? place.open[column] : 0.0F;
    return open ? Arithmetic::join(place.closed[column], place.open[column], step) : place.closed[column];
  }
};

}  // namespace ringattn::cuda
