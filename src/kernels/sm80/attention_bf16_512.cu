// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/sliced/launch.cuh"

namespace ringattn::sm80 {

constinit const cuda::Launcher attention_bf16_512 = sliced_launcher_of<__nv_bfloat16, config_for(512, 512)>();

}  // namespace ringattn::sm80
