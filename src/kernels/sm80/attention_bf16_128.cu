// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/launch.cuh"

namespace ringattn::sm80 {

constinit const cuda::Launcher attention_bf16_128 = launcher_of<__nv_bfloat16, config_for(128, 128)>();
constinit const cuda::Launcher positioned_bf16_128 = launcher_of<__nv_bfloat16, config_for(128, 128), true>();

}  // namespace ringattn::sm80
