// SPDX-License-Identifier: Apache-2.0
// MLA decode on Hopper, one CTA per row block. A work tile is one KV split for 64 rows of one KV head
// (decode/work_tiles.cuh). One producer warp loads key tiles (mla_producer.cuh). Two consumer warpgroups compute
// attention: each holds half of the output columns of all 64 rows, and computes the scores of every second tile for
// both (mla_consumer.cuh).
//
// In a cluster of two, the CTAs process the same key tiles for two row blocks. Each CTA multicasts half of every tile.
#pragma once

#include "kernels/mla/sm90/mla_consumer.cuh"
#include "kernels/mla/sm90/mla_dequantize.cuh"
#include "kernels/mla/sm90/mla_producer.cuh"
#include "kernels/mla/sm90/mla_schedule.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) mla_kernel(const __grid_constant__ typename C::Params launch_params) {
  constexpr int kOtherRegisters = C::kFp8 ? 72 : 40;
  constexpr int kConsumerRegisters = (kMlaRegisters - kOtherRegisters) / 2;
  const DecodeParams& params = step_of(launch_params);
  const std::uint32_t rank = C::kCtas > 1 ? rank_in_cluster() : 0;
  const MlaMap map{C::kCtas > 1 ? map_to_cta(kReservedBytes, rank) : kReservedBytes};
  if (threadIdx.x == 0) init_mla_barriers(map, C::kCtas, C::kFp8 ? kDequantizers : 0);
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  if (threadIdx.x / 32 == kMlaConsumerThreads / 32) plan_work_tiles<C>(params, map);
  __syncthreads();
  if constexpr (C::kCtas > 1) cluster_sync();
  const auto run = [&](auto&& worker) {
    for_each_work_tile<C>(params, map, [&](const DecodeWorkTile& work_tile) { worker.process(work_tile); });
  };
  if (threadIdx.x < kMlaConsumerThreads) {
    reg_alloc<kConsumerRegisters>();
    run(MlaConsumer<C>(params, map));
  } else {
    reg_dealloc<kOtherRegisters>();
    if constexpr (C::kFp8) {
      run(MlaDequantizer<C>(launch_params, map, rank));
    } else {
      if (threadIdx.x / 32 == kMlaConsumerThreads / 32) run(MlaProducer<C>(params, map, rank));
    }
  }
  if constexpr (C::kCtas > 1) {  // DSMEM of a CTA must not be accessed after it exits
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace ringattn::sm90
