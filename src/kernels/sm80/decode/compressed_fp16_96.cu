// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/decode/compressed_launch.cuh"

namespace ringattn::sm80 {

constinit const CompressedLauncher compressed_fp16_96 = compressed_launcher<__half, config_for(96, 96)>();

}  // namespace ringattn::sm80
