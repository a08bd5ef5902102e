// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/fold/launch.cuh"

namespace ringattn::sm90 {

void launch_fp16_128(const cuda::FoldParams& params, Stream stream) {
  launch_fold<__half, kFoldConfigs[2]>(params, stream);
}

}  // namespace ringattn::sm90
