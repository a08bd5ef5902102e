// SPDX-License-Identifier: Apache-2.0
// MLA decode with a CTA pair, a cluster of two CTAs, per work tile. A work tile is one KV split for 64 rows
// (decode/work_tiles.cuh). Each CTA has half of the output columns, and scores every second tile for both
// (cta_pair_map.cuh). One warpgroup computes scores (cta_pair_score.cuh), one the outputs (cta_pair_outputs.cuh), one
// warp is the producer (cta_pair_producer.cuh), and one sends (cta_pair_send.cuh). Each output column is accumulated
// over the tiles in order, while the tensor cores of both CTAs overlap the scores of one tile with P V of another.
#pragma once

#include "kernels/mla/sm90/cta_pair_dequantize.cuh"
#include "kernels/mla/sm90/cta_pair_outputs.cuh"
#include "kernels/mla/sm90/cta_pair_producer.cuh"
#include "kernels/mla/sm90/cta_pair_score.cuh"
#include "kernels/mla/sm90/cta_pair_send.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1)
    cta_pair_kernel(const __grid_constant__ typename C::Params launch_params) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = C::kFp8 ? 80 : 56;
  const DecodeParams& params = step_of(launch_params);
  const std::uint32_t rank = rank_in_cluster();
  const CtaPairMap map{map_to_cta(kReservedBytes, rank), rank};
  if (threadIdx.x == 0) init_cta_pair_barriers(map, C::kFp8 ? kCtaPairDequantizers : 0);
  cuda::pdl_launch_dependents();
  __syncthreads();
  cluster_sync();
  cuda::pdl_wait();
  if (threadIdx.x < kWarpgroup) {
    reg_alloc<kScoreRegisters>();
    CtaPairScorer<C> scorer(params, map);
    for_each_work_tile(map, scorer);
    scorer.await_last();
  } else if (threadIdx.x < 2 * kWarpgroup) {
    reg_alloc<kMlaRegisters - kScoreRegisters - kOtherRegisters>();
    CtaPairOutputs<C> outputs(params, map);
    for_each_work_tile(map, outputs);
  } else {
    reg_dealloc<kOtherRegisters>();
    if (threadIdx.x / 32 == kCtaPairConsumers * kWarpgroup / 32) {
      CtaPairProducer<C>(params, map).run(static_cast<int>(blockIdx.x) / 2, static_cast<int>(gridDim.x) / 2);
    } else if (threadIdx.x / 32 == kCtaPairConsumers * kWarpgroup / 32 + 1) {
      CtaPairSender sender(map);
      for_each_work_tile(map, sender);
    } else if constexpr (C::kFp8) {
      CtaPairDequantizer<C> dequantizer(launch_params, map);
      for_each_work_tile(map, dequantizer);
    }
  }
  // DSMEM of a CTA must not be accessed after it exits. All stores that the peer sent here have been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
