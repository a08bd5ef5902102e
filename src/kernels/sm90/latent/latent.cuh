// SPDX-License-Identifier: Apache-2.0
// Decoding over latents on Hopper. A CTA takes units, each a group of key tiles for 64 rows of one KV head
// (decode/units.cuh). One warp fetches tiles (latent_fetch.cuh). Two warpgroups fold: each has half of the columns of
// the 64 rows' outputs, and scores every second tile for both (latent_fold.cuh).
//
// The CTAs of a cluster walk over the same tiles, for two blocks of rows. Each fetches a part of every tile for both.
#pragma once

#include "kernels/sm90/latent/latent_expand.cuh"
#include "kernels/sm90/latent/latent_fetch.cuh"
#include "kernels/sm90/latent/latent_fold.cuh"
#include "kernels/sm90/latent/latent_walk.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_kernel(const __grid_constant__ typename C::Params of_launch) {
  constexpr int kOtherRegisters = C::kCodes ? 72 : 40;
  constexpr int kFoldRegisters = (kLatentRegisters - kOtherRegisters) / 2;
  const DecodeParams& params = step_of(of_launch);
  const std::uint32_t rank = C::kCtas > 1 ? rank_in_cluster() : 0;
  const LatentMap map{C::kCtas > 1 ? in_cta(kReservedBytes, rank) : kReservedBytes};
  if (threadIdx.x == 0) init_latent_barriers(map, C::kCtas, C::kCodes ? kExpanders : 0);
  cuda::let_next_begin();
  cuda::await_kernels_before();
  if (threadIdx.x / 32 == kLatentFoldThreads / 32) plan_units<C>(params, map);
  __syncthreads();
  if constexpr (C::kCtas > 1) cluster_sync();
  const auto each_unit = [&](auto&& worker) {
    for_each_unit<C>(params, map, [&](const DecodeUnit& unit) { worker.take(unit); });
  };
  if (threadIdx.x < kLatentFoldThreads) {
    take_registers<kFoldRegisters>();
    each_unit(LatentFold<C>(params, map));
  } else {
    give_registers<kOtherRegisters>();
    if constexpr (C::kCodes) {
      each_unit(LatentExpander<C>(of_launch, map, rank));
    } else {
      if (threadIdx.x / 32 == kLatentFoldThreads / 32) each_unit(LatentFetcher<C>(params, map, rank));
    }
  }
  if constexpr (C::kCtas > 1) {  // nobody writes to a CTA that has gone
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace ringattn::sm90
