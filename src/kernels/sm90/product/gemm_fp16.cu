// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/product/launch.cuh"

namespace ringattn::sm90 {

constinit const cuda::GemmLauncher gemm_fp16 = gemm_launcher<__half>();

}  // namespace ringattn::sm90
