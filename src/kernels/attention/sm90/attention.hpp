// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_attention: one for each element type and head dim (kernels/instances.cmake).
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::sm90 {

extern const cuda::Launcher attention_bf16_64;
extern const cuda::Launcher attention_bf16_96;
extern const cuda::Launcher attention_bf16_128;
extern const cuda::Launcher attention_bf16_192;
extern const cuda::Launcher attention_bf16_256;
extern const cuda::Launcher attention_fp16_64;
extern const cuda::Launcher attention_fp16_96;
extern const cuda::Launcher attention_fp16_128;
extern const cuda::Launcher attention_fp16_192;
extern const cuda::Launcher attention_fp16_256;

}  // namespace ringattn::sm90
