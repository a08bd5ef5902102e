// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of sm80_attention_backward, and how the host reaches its compiled kernels.
#pragma once

#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::sm80 {

struct DqParams {
  cuda::BackwardCommon common;
  const float* stats;  // [rows, heads, kRowStats]
  cuda::BackwardGradient dq;
};

struct DkvParams {
  cuda::BackwardCommon common;
  cuda::BackwardGradient dk, dv;
};

struct BackwardLauncher {
  // Loads the kernels on the current device.
  void (*prepare)();
  // Enqueue. At least one pair is in the tables.
  void (*dq)(const DqParams& params, int ctas, Stream stream);
  void (*dkv)(const DkvParams& params, int ctas, Stream stream);
};

extern const BackwardLauncher attention_backward_bf16_64;
extern const BackwardLauncher attention_backward_bf16_96;
extern const BackwardLauncher attention_backward_bf16_128;
extern const BackwardLauncher attention_backward_bf16_192;
extern const BackwardLauncher attention_backward_bf16_256;
extern const BackwardLauncher attention_backward_fp16_64;
extern const BackwardLauncher attention_backward_fp16_96;
extern const BackwardLauncher attention_backward_fp16_128;
extern const BackwardLauncher attention_backward_fp16_192;
extern const BackwardLauncher attention_backward_fp16_256;

}  // namespace ringattn::sm80
