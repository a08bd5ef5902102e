// SPDX-License-Identifier: Apache-2.0
// The registry entry `sm80_attention`, and its compiled kernels: tensor cores through mma.sync, Ampere and newer. bf16
// and fp16; head_dim 64, 96, 128, 256, 512, 192 with head_dim_v 128, and 576 with 512; all masks, soft-cap, sinks, and,
// up to head_dim 256, keys with explicit positions.
#pragma once

#include <memory>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel. config.hpp lists the supported specs.
std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend);

// The compiled kernels of sm80_attention: one for each pair of element type and configuration
// (kernels/instances.cmake). Configurations with one slice have a second kernel, for keys with explicit positions.

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
