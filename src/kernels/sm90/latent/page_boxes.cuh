// SPDX-License-Identifier: Apache-2.0
// The boxes of a tile that a warp fetches: runs of rows that lie in one page each. Lane i has looked up the i-th of
// them, and one lane has the copy engine issue_loads them all. If each lane brought its own, its instructions would
// wait for those of the lanes before it, as all of a warp's lanes give what they ask for in the same registers.
#pragma once

#include "kernels/sm90/decode/page_boxes.cuh"
#include "kernels/sm90/decode/work_tiles.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/ptx/threads.cuh"

namespace ringattn::sm90 {

// This lane's box of a tile of the work_tile's, of those of `boxes` lanes, which begin at the tile's row `first_row`.
__device__ __forceinline__ PageBox box_of_lane(const DecodeParams& p, const DecodeWorkTile& work_tile, int tile,
                                               int first_row, int boxes) {
  const int lane = thread_of_cta() % 32;
  const int key = tile * kMlaKeyTile + first_row + lane * p.box_rows;
  if (lane >= boxes || tile >= work_tile.end || key >= work_tile.of.length) return {0, -1};
  const int here = key - work_tile.lag;
  if (p.pages == nullptr) return {work_tile.sequence, here};
  return {__ldcg(p.pages + work_tile.sequence * p.table_stride + (here >> p.page_log)), here & ((1 << p.page_log) - 1)};
}

// How many rows the boxes of a tile issue_loads. `left`: keys of the sequence from the tile's first one on.
__device__ __forceinline__ int box_rows_of(const DecodeParams& p, int left) {
  const int keys = left < kMlaKeyTile ? left : kMlaKeyTile;
  return (keys + p.box_rows - 1) & -p.box_rows;  // boxes have a power of two
}

// Calls visit(i, box) by one lane for the warp's first `count` boxes, up to the first one without keys.
template <class Visit>
__device__ __forceinline__ void for_boxes(const PageBox& of_lane, int count, Visit visit) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const PageBox box{__shfl_sync(0xffffffffU, of_lane.page, i), __shfl_sync(0xffffffffU, of_lane.row, i)};
    if (box.row < 0) break;
    if (elect_one()) visit(i, box);
  }
  __syncwarp();
}

}  // namespace ringattn::sm90
