// SPDX-License-Identifier: Apache-2.0
// Scores of jobs that scale and cap scores before the exponential (AttentionParams::Softmax::scaled_first).
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

// cap · tanh(x / cap) = cap − 2 cap / (e^(2x / cap) + 1); the absolute error is a few 2⁻²³ of the cap.
__device__ __forceinline__ float scaled_score(const AttentionParams::Softmax& softmax, float x) {
  constexpr float kTwoLog2E = 2.88539008F;
  const float inner = softmax.cap > 0.0F ? kTwoLog2E * softmax.scale / softmax.cap : 0.0F;
  const float outer = -2.0F * softmax.cap;
  return softmax.cap > 0.0F
             ? __fmaf_rn(outer, reciprocal_approx(__fadd_rn(exp2_approx(__fmul_rn(x, inner)), 1.0F)), softmax.cap)
             : __fmul_rn(x, softmax.scale);
}

}  // namespace ringattn::cuda
