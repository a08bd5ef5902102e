// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/launch.cuh"

namespace ringattn::sm90 {

constinit const MlaLauncher<DecodeParams> mla_bf16 = mla_launcher<__nv_bfloat16, false>();

}  // namespace ringattn::sm90
