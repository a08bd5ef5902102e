// SPDX-License-Identifier: Apache-2.0
// Copies the query rows of a work tile from global to shared memory, in the layout of the consumer's wgmma.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode_map.cuh"
#include "kernels/decode/sm90/finish.cuh"

namespace ringattn::sm90 {

// The consumer warpgroup calls it. coord_of_row(i) is the coordinate of row i of `rows`. Missing rows, and columns
// past head_dim, become zeros.
template <class C, class Map, class CoordOfRow>
__device__ __forceinline__ void load_queries(const DecodeParams& params, const Map& map, int rows,
                                             CoordOfRow coord_of_row) {
  constexpr int kChunks = C::kQBytes / kQueryTile / 16;
  const cuda::AttentionParams& p = params.attention;
  const auto* const q = static_cast<const std::uint16_t*>(p.q.data);
  const bool aligned =
      ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p.q.token_stride | p.q.head_stride))) &
       15U) == 0;
  // From here on no thread reads the previous work tile's rows.
  named_sync(kDecodeBarrier, kDecodeConsumerThreads);
  // A rolled loop, since it runs once. Its copies are in flight together.
#pragma unroll 1
  for (int i = thread_of_cta(); i < kQueryTile * kChunks; i += kDecodeConsumerThreads) {
    const int tile_row = i / kChunks;
    const int chunk = i % kChunks;
    const bool present = tile_row < rows && chunk * 8 < C::kDim;
    const DecodeCoord coord = coord_of_row(tile_row < rows ? tile_row : 0);
    const auto* const from =
        q + coord.row * p.q.token_stride + coord.query_head * p.q.head_stride + (present ? chunk * 8 : 0);
    const std::uint32_t to = map.q() + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kQueryTile)) +
                             cuda::swizzled(tile_row, chunk % 8);
    if (aligned) {
      cuda::copy_16(to, from, present);
    } else {
      cuda::store_shared(to, present ? load_elements(from, false) : uint4{0, 0, 0, 0});
    }
  }
  cuda::copy_commit();
  cuda::copy_wait<0>();
  proxy_fence();
  named_sync(kDecodeBarrier, kDecodeConsumerThreads);
}

}  // namespace ringattn::sm90
