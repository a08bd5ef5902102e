// SPDX-License-Identifier: Apache-2.0
// Decoding over latents on Hopper. A CTA takes work_tiles, each a group of key tiles for 64 rows of one KV head
// (decode/work_tiles.cuh). One warp fetches tiles (mla_producer.cuh). Two warpgroups fold: each has half of the columns
// of the 64 rows' outputs, and scores every second tile for both (mla_consumer.cuh).
//
// The CTAs of a cluster walk over the same tiles, for two blocks of rows. Each fetches a part of every tile for both.
#pragma once

#include "kernels/sm90/latent/mla_consumer.cuh"
#include "kernels/sm90/latent/mla_dequantize.cuh"
#include "kernels/sm90/latent/mla_producer.cuh"
#include "kernels/sm90/latent/mla_schedule.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) mla_kernel(const __grid_constant__ typename C::Params of_launch) {
  constexpr int kOtherRegisters = C::kFp8 ? 72 : 40;
  constexpr int kConsumerRegisters = (kMlaRegisters - kOtherRegisters) / 2;
  const DecodeParams& params = step_of(of_launch);
  const std::uint32_t rank = C::kCtas > 1 ? rank_in_cluster() : 0;
  const MlaMap map{C::kCtas > 1 ? in_cta(kReservedBytes, rank) : kReservedBytes};
  if (threadIdx.x == 0) init_mla_barriers(map, C::kCtas, C::kFp8 ? kDequantizers : 0);
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  if (threadIdx.x / 32 == kMlaConsumerThreads / 32) plan_work_tiles<C>(params, map);
  __syncthreads();
  if constexpr (C::kCtas > 1) cluster_sync();
  const auto each_work_tile = [&](auto&& worker) {
    for_each_work_tile<C>(params, map, [&](const DecodeWorkTile& work_tile) { worker.take(work_tile); });
  };
  if (threadIdx.x < kMlaConsumerThreads) {
    reg_alloc<kConsumerRegisters>();
    each_work_tile(MlaConsumer<C>(params, map));
  } else {
    reg_dealloc<kOtherRegisters>();
    if constexpr (C::kFp8) {
      each_work_tile(MlaDequantizer<C>(of_launch, map, rank));
    } else {
      if (threadIdx.x / 32 == kMlaConsumerThreads / 32) each_work_tile(MlaProducer<C>(params, map, rank));
    }
  }
  if constexpr (C::kCtas > 1) {  // nobody writes to a CTA that has gone
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace ringattn::sm90
