// SPDX-License-Identifier: Apache-2.0
// Layout of a V tile in the sliced kernel, and zeroing of the rows past the end of a sequence.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

// Offset in a V tile of 8 columns of a row.
template <class C>
__device__ __forceinline__ std::uint32_t value_chunk(int row, int chunk) {
  return tile_chunk<C::kKeyTile, C::kVRowBytes>(row, chunk);
}

// As Decoder::clear_tail(), for one warp: zeroes kChunks · 8 columns of the rows after `keys` of the tile at `v`.
template <class C, int kChunks>
__device__ __forceinline__ void clear_value_tail(std::uint32_t v, int first_chunk, int keys, int lane) {
#pragma unroll 1
  for (int row = keys + lane; row < C::kKeyTile; row += 32) {
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      cuda::store_shared(v + value_chunk<C>(row, first_chunk + n), uint4{0, 0, 0, 0});
    }
  }
  proxy_fence();  // orders the writes before a later TMA load; lanes that copy values (lane_copies.cuh) need none
  __syncwarp();
}

}  // namespace ringattn::sm90
