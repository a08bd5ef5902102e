// SPDX-License-Identifier: Apache-2.0
// The end of a row, once its last key is folded: the sink joins, and what remains is to scale the outputs and to take
// the logarithm. References are in natural units of the scaled scores.
#pragma once

#include <cmath>

#include "base/host_device.hpp"

namespace ringattn::cuda {

struct RowEnd {
  float softmax_offset;
  float sum;     // Σ exp(x − softmax_offset), with the sink's share
  float weight;  // exp of how far the softmax_offset has moved: what the outputs are multiplied by first

  __device__ __forceinline__ float lse() const { return __fadd_rn(softmax_offset, logf(sum)); }
  // Where nothing was seen, O is 0, and log 0 is −∞.
  __device__ __forceinline__ float divisor() const { return sum == 0.0F ? 1.0F : sum; }
  // Of the outputs, where they are multiplied by one number instead of multiplied and divided.
  __device__ __forceinline__ float factor() const { return __fmul_rn(weight, __frcp_rn(divisor())); }
};

// `sink` is the head's logit, or null: one more score, without a value. `exp` gives the row's weight.
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

// Of the tensor-core kernels.
__device__ __forceinline__ RowEnd end_row(float softmax_offset, float sum, const float* sink) {
  return end_row(softmax_offset, sum, sink, [](float x) { return expf(x); });
}

}  // namespace ringattn::cuda
