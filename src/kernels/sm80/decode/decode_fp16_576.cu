// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/decode/launch.cuh"

namespace ringattn::sm80 {

constinit const DecodeLauncher decode_fp16_576 = decode_launcher<__half, config_for(576, 512)>();

}  // namespace ringattn::sm80
