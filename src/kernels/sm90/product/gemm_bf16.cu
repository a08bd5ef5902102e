// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/product/launch.cuh"

namespace ringattn::sm90 {

constinit const cuda::GemmLauncher gemm_bf16 = gemm_launcher<__nv_bfloat16>();

}  // namespace ringattn::sm90
