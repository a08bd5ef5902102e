// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/scan/launch.cuh"

namespace ringattn::sm90 {

constinit const HopperSsdLauncher ssd_128 = ssd_launcher<128>();

}  // namespace ringattn::sm90
