// SPDX-License-Identifier: Apache-2.0
// Scores of jobs that scale and cap scores before the exponential (AttentionParams::Softmax::scaled_first).
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

// Scales and caps scores: cap · tanh(x / cap) = cap − 2 cap / (e^(2x / cap) + 1); the absolute error is a few 2⁻²³ of
// the cap. Made once for a tile, as its members are constants of a loop over scores.
class ScoreScaling {
 public:
  __device__ __forceinline__ explicit ScoreScaling(const AttentionParams::Softmax& softmax)
      : scale_(softmax.scale),
        cap_(softmax.cap),
        inner_(softmax.cap > 0.0F ? kTwoLog2E * softmax.scale / softmax.cap : 0.0F),
        outer_(-2.0F * softmax.cap) {}

  __device__ __forceinline__ float scaled(float x) const {
    return cap_ > 0.0F ? __fmaf_rn(outer_, reciprocal_approx(__fadd_rn(exp2_approx(__fmul_rn(x, inner_)), 1.0F)), cap_)
                       : __fmul_rn(x, scale_);
  }

 private:
  static constexpr float kTwoLog2E = 2.88539008F;

  float scale_, cap_, inner_, outer_;
};

}  // namespace ringattn::cuda
