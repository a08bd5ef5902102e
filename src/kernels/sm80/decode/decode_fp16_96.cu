// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/decode/launch.cuh"

namespace ringattn::sm80 {

constinit const DecodeLauncher decode_fp16_96 = decode_launcher<__half, config_for(96, 96)>();

}  // namespace ringattn::sm80
