// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/decode/compressed_launch.cuh"

namespace ringattn::sm90 {

constinit const CompressedLauncher compressed_fp16_256 = compressed_launcher<__half, config_for(256, 256)>();

}  // namespace ringattn::sm90
