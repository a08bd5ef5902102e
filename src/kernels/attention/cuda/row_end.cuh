// SPDX-License-Identifier: Apache-2.0
// Softmax epilogue of a row after its last key: adds the sink, and computes the normalization and the log-sum-exp.
// softmax_offsets are in natural units of the scaled scores.
#pragma once

#include <cmath>

#include "base/host_device.hpp"

namespace ringattn::cuda {

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
