// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/launch.cuh"

namespace ringattn::sm90 {

constinit const MlaLauncher<DecodeParams> mla_fp16 = mla_launcher<__half, false>();

}  // namespace ringattn::sm90
