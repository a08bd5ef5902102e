// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/fold/launch.cuh"

namespace ringattn::sm90 {

constinit const cuda::Launcher attention_fp16_256 = launcher_of<__half, config_for(256, 256)>();

}  // namespace ringattn::sm90
