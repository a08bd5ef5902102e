// SPDX-License-Identifier: Apache-2.0
// Sums of several values over groups of lanes.
#pragma once

namespace ringattn::cuda {

// Sums each value over the eight lanes 8 g … 8 g + 7 of a group, by halves. Lane 8 g + i gets the sum of values[i]. By
// all lanes of a warp.
__device__ __forceinline__ float sum_over_eight_lanes(float (&values)[8]) {
#pragma unroll
  for (int other = 4; other > 0; other /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(other)) != 0;
#pragma unroll
    for (int i = 0; i < other; ++i) {
      const float sent = upper ? values[i] : values[i + other];
      const float kept = upper ? values[i + other] : values[i];
      values[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffU, sent, other));
    }
  }
  return values[0];
}

}  // namespace ringattn::cuda
