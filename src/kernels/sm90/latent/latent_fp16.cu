// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/launch.cuh"

namespace ringattn::sm90 {

constinit const LatentLauncher<DecodeParams> latent_fp16 = latent_launcher<__half, false>();

}  // namespace ringattn::sm90
