// SPDX-License-Identifier: Apache-2.0
// TMA boxes of a key tile: each is a run of rows within one page. Lane i looks up box i, and one lane issues all loads.
// If each lane issued its own, the instructions of the lanes would serialize, as TMA operands are in uniform registers.
#pragma once

#include "kernels/common/sm90/threads.cuh"
#include "kernels/decode/sm90/page_boxes.cuh"
#include "kernels/decode/sm90/work_tiles.cuh"
#include "kernels/mla/sm90/config.hpp"

namespace ringattn::sm90 {

// This lane's box of the tile, among the `boxes` boxes that start at the tile's row `first_row`. row = -1: no keys.
__device__ __forceinline__ PageBox box_of_lane(const DecodeParams& p, const DecodeWorkTile& work_tile, int tile,
                                               int first_row, int boxes) {
  const int lane = thread_of_cta() % 32;
  const int key = tile * kMlaKeyTile + first_row + lane * p.box_rows;
  if (lane >= boxes || tile >= work_tile.end || key >= work_tile.seq_info.length) return {0, -1};
  const int here = key - work_tile.lag;
  if (p.pages == nullptr) return {work_tile.sequence, here};
  return {__ldcg(p.pages + work_tile.sequence * p.table_stride + (here >> p.page_log)), here & ((1 << p.page_log) - 1)};
}

// Rows of a tile that its boxes load. `left`: keys of the sequence from the tile's first key on.
__device__ __forceinline__ int box_rows_of(const DecodeParams& p, int left) {
  const int keys = left < kMlaKeyTile ? left : kMlaKeyTile;
  return (keys + p.box_rows - 1) & -p.box_rows;  // box_rows is a power of two
}

// Calls visit(i, box) from one lane for each of the warp's first `count` boxes, up to the first box without keys.
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
