// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm80_simt_backward.
#pragma once

#include <cstdint>

#include "base/memory.hpp"
#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::cuda {

inline constexpr int kSimtBackwardCtas = 2;  // per multiprocessor
// Maximum columns of dQ, or of dK and of dV, that a CTA computes. Wider gradients take several CTAs.
inline constexpr int kSimtBackwardColumns = 128;

struct SimtBackwardParams {
  BackwardCommon common;
  const float* stats;             // [rows, heads, kRowStats] of dQ's rows; null for dK and dV, whose tiles have them
  BackwardGradient gradients[2];  // dQ, or dK and dV
  std::int32_t head_dim, head_dim_v;
  std::int32_t dtype;  // a ringattn::Dtype
};

// Loads the kernels on the current device.
void prepare_simt_backward();
// Enqueue. At least one pair is in the tables.
void launch_simt_dq(const SimtBackwardParams& params, int ctas, Stream stream);
void launch_simt_dkv(const SimtBackwardParams& params, int ctas, Stream stream);

}  // namespace ringattn::cuda
