// SPDX-License-Identifier: Apache-2.0
// The boxes of a tile that a warp fetches: runs of rows that lie in one page each. Lane i has looked up the i-th of
// them, and one lane has the copy engine bring them all. If each lane brought its own, its instructions would wait for
// those of the lanes before it, as all of a warp's lanes give what they ask for in the same registers.
#pragma once

#include "kernels/sm90/decode/page_boxes.cuh"
#include "kernels/sm90/ptx/threads.cuh"

namespace ringattn::sm90 {

// Calls visit(i, box) by one lane for the warp's first `count` boxes, up to the first one without keys.
template <class Visit>
__device__ __forceinline__ void for_boxes(const PageBox& of_lane, int count, Visit visit) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const PageBox box{__shfl_sync(0xffffffffU, of_lane.page, i), __shfl_sync(0xffffffffU, of_lane.row, i)};
    if (box.row < 0) break;
    if (one_of_warp()) visit(i, box);
  }
  __syncwarp();
}

}  // namespace ringattn::sm90
