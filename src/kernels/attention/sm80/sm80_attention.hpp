// SPDX-License-Identifier: Apache-2.0
// The registry entry `sm80_attention`: tensor cores through mma.sync, Ampere and newer. bf16 and fp16; head_dim 64, 96,
// 128, 256, 512, 192 with head_dim_v 128, and 576 with 512; all masks, soft-cap, sinks, and, up to head_dim 256, keys
// with explicit positions.
#pragma once

#include <memory>

#include "kernels/attention/attention.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel. config.hpp lists the supported specs.
std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
