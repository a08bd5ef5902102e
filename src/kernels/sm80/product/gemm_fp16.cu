// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/product/launch.cuh"

namespace ringattn::sm80 {

constinit const cuda::GemmLauncher gemm_fp16 = gemm_launcher<__half>();

}  // namespace ringattn::sm80
