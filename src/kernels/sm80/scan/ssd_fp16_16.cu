// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/scan/ssd_launch.cuh"

namespace ringattn::sm80 {

constinit const SsdLauncher ssd_fp16_16 = ssd_launcher<__half, 16>();

}  // namespace ringattn::sm80
