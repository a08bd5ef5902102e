// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/launch.cuh"

namespace ringattn::sm80 {

constinit const cuda::Launcher attention_fp16_256 = launcher_of<__half, config_for(256, 256)>();
constinit const cuda::Launcher positioned_fp16_256 = launcher_of<__half, config_for(256, 256), true>();

}  // namespace ringattn::sm80
