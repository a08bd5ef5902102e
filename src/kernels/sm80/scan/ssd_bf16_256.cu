// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/scan/ssd_launch.cuh"

namespace ringattn::sm80 {

constinit const SsdLauncher ssd_bf16_256 = ssd_launcher<__nv_bfloat16, 256>();

}  // namespace ringattn::sm80
