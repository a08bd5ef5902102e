// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/launch.cuh"

namespace ringattn::sm80 {

constinit const cuda::Launcher attention_fp16_192 = launcher_of<__half, config_for(192, 128)>();
constinit const cuda::Launcher positioned_fp16_192 = launcher_of<__half, config_for(192, 128), true>();

}  // namespace ringattn::sm80
