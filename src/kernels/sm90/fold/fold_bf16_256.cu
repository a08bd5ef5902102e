// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/fold/launch.cuh"

namespace ringattn::sm90 {

void launch_bf16_256(const cuda::FoldParams& params, Stream stream) {
  launch_fold<__nv_bfloat16, kFoldConfigs[4]>(params, stream);
}

}  // namespace ringattn::sm90
