// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/scan/launch.cuh"

namespace ringattn::sm90 {

constinit const HopperSsdLauncher ssd_64 = ssd_launcher<64>();

}  // namespace ringattn::sm90
