// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm80_attention: one for each pair of element type and configuration
// (kernels/instances.cmake). Configurations with one slice have a second kernel, for keys with explicit positions.
#pragma once

#include "kernels/attention/cuda/launcher.hpp"

namespace ringattn::sm80 {

extern const cuda::Launcher attention_bf16_64;
extern const cuda::Launcher attention_bf16_96;
extern const cuda::Launcher attention_bf16_128;
extern const cuda::Launcher attention_bf16_192;
extern const cuda::Launcher attention_bf16_256;
extern const cuda::Launcher attention_bf16_512;
extern const cuda::Launcher attention_bf16_576;
extern const cuda::Launcher attention_fp16_64;
extern const cuda::Launcher attention_fp16_96;
extern const cuda::Launcher attention_fp16_128;
extern const cuda::Launcher attention_fp16_192;
extern const cuda::Launcher attention_fp16_256;
extern const cuda::Launcher attention_fp16_512;
extern const cuda::Launcher attention_fp16_576;
extern const cuda::Launcher positioned_bf16_64;
extern const cuda::Launcher positioned_bf16_96;
extern const cuda::Launcher positioned_bf16_128;
extern const cuda::Launcher positioned_bf16_192;
extern const cuda::Launcher positioned_bf16_256;
extern const cuda::Launcher positioned_fp16_64;
extern const cuda::Launcher positioned_fp16_96;
extern const cuda::Launcher positioned_fp16_128;
extern const cuda::Launcher positioned_fp16_192;
extern const cuda::Launcher positioned_fp16_256;

}  // namespace ringattn::sm80
