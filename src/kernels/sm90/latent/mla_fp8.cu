// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/launch.cuh"

namespace ringattn::sm90 {

constinit const MlaLauncher<MlaFp8Params> mla_fp8 = mla_launcher<__nv_bfloat16, true>();

}  // namespace ringattn::sm90
