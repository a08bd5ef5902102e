// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/decode/launch.cuh"

namespace ringattn::sm80 {

constinit const DecodeLauncher decode_bf16_512 = decode_launcher<__nv_bfloat16, config_for(512, 512)>();

}  // namespace ringattn::sm80
