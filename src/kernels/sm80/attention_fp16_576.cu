// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/sliced/launch.cuh"

namespace ringattn::sm80 {

constinit const cuda::Launcher attention_fp16_576 = sliced_launcher_of<__half, config_for(576, 512)>();

}  // namespace ringattn::sm80
