// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/fold/launch.cuh"

namespace ringattn::sm90 {

constinit const cuda::Launcher attention_bf16_192 = launcher_of<__nv_bfloat16, config_for(192, 128)>();

}  // namespace ringattn::sm90
