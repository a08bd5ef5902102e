// SPDX-License-Identifier: Apache-2.0
// The Hopper attention kernel: warp-specialized, persistent, with TMA and wgmma. A CTA computes GQA-packed tiles: each
// consumer warpgroup has one head work tile, and all share the K/V tiles that the producer loads. Every bit of the
// output is a function of the row, its keys, the job and the template parameters. The schedule decides only where and
// when a tile is computed.
//
// Read next: scheduler.cuh (shared memory, work tiles, pace) → producer.cuh → consumer.cuh → tile_step.cuh →
// row_state.cuh.
#pragma once

#include "kernels/attention/sm90/consumer.cuh"
#include "kernels/attention/sm90/producer.cuh"
#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/threads.cuh"

namespace ringattn::sm90 {

// `fetching`: producer threads that read a Q stage's work tile and load its tensors.
template <class C>
__device__ __forceinline__ void init_barriers(const SharedMap<C>& map, int fetching) {
  for (std::uint32_t i = 0; i < C::kQStages; ++i) {
    barrier_init(map.work_full(i), 32);
    barrier_init(map.q_full(i), 1);
    barrier_init(map.q_empty(i), kWarpgroup * C::kHeadTiles + fetching);
  }
  for (std::uint32_t i = 0; i < C::kStages; ++i) {
    barrier_init(map.k_full(i), 1);
    barrier_init(map.v_full(i), 1);
    barrier_init(map.k_empty(i), C::kClusterCtas * (C::kKeysAhead ? C::kHeadTiles * kWarpgroup / 32 : C::kHeadTiles));
    if (C::kKeysAhead) barrier_init(map.v_empty(i), C::kClusterCtas * C::kHeadTiles);
  }
  barrier_init(map.tail_landed(), 1);
  barrier_init(map.tail_requested(), 1);
  barrier_init(map.tail_done(), C::kClusterCtas * 32);
  barrier_init(map.pace_requested(), 1);
  barrier_init(map.pace_free(), 32);
  barrier_init(map.work_requested(), 1);
  barrier_init(map.number_sent(), 1);
  barrier_init(map.number_read(), 1);
  barrier_init_fence();
}

// Synchronizes all threads of the CTA, or of the CTA pair.
template <class C>
__device__ __forceinline__ void sync_all() {
  if constexpr (C::kClusterCtas > 1) {
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_kernel(const __grid_constant__ HopperParams params) {
  // Begins at SharedMap::base(), as the kernel has no static shared memory.
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedMap<C> map;
  if (threadIdx.x == 0) init_barriers<C>(map, params.bulk_in ? 32 : kProducerThreads);
  sync_all<C>();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    reg_dealloc<C::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 1) {
      schedule<C>(params.attention, map, shared);
    } else if (!params.bulk_in) {
      fetch_by_threads<C>(params, map, shared, static_cast<int>(threadIdx.x) - (warp == 0 ? 0 : 32));
    } else if (warp == 0) {
      if (params.attention.tables.page_runs == 1) {
        fetch<C, false>(params, map, shared);
      } else {
        fetch<C, true>(params, map, shared);
      }
    } else if (warp == 2) {
      clear_tails<C>(map);
    } else if (params.attention.schedule.keep_pace) {
      keep_pace<C>(params.attention, map);
    }
  } else {
    reg_alloc<C::kConsumerRegisters>();
    consume<C>(params, map);
  }
  if constexpr (C::kClusterCtas > 1) sync_all<C>();  // the peer CTA may write to this CTA's shared memory until here
}

}  // namespace ringattn::sm90
