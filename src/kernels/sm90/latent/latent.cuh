// SPDX-License-Identifier: Apache-2.0
// Decoding over latents on Hopper. A CTA takes units, each a group of 64 key tiles for 64 rows of one KV head
// (decode/units.cuh), or a slice of such a unit's outputs. One warp fetches tiles (latent_fetch.cuh). Two warpgroups
// fold: each has half of the slice's columns of the 64 rows' outputs, and scores every second tile for both
// (latent_fold.cuh).
#pragma once

#include "kernels/sm90/latent/latent_fetch.cuh"
#include "kernels/sm90/latent/latent_fold.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kLatentThreads, 1) latent_kernel(const __grid_constant__ DecodeParams params) {
  const LatentMap map;
  if (threadIdx.x == 0) init_latent_barriers(map);
  if (threadIdx.x / 32 == kLatentFoldThreads / 32) count_units<C>(params, map);
  __syncthreads();
  const int pieces = unit_count(params, map) * C::kSlices;
  const auto each_piece = [&](auto&& worker) {
#pragma unroll 1
    for (int n = static_cast<int>(blockIdx.x); n < pieces; n += static_cast<int>(gridDim.x)) {
      worker.take(unit_of<C>(params, map, n / C::kSlices), n % C::kSlices);
    }
  };
  if (threadIdx.x < kLatentFoldThreads) {
    take_registers<240>();
    each_piece(LatentFold<C>(params, map));
  } else {
    give_registers<24>();
    if (threadIdx.x / 32 == kLatentFoldThreads / 32) each_piece(LatentFetcher(params, map));
  }
}

}  // namespace ringattn::sm90
