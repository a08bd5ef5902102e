// SPDX-License-Identifier: Apache-2.0
// Decoding over latents by pairs of CTAs. A cluster of two takes work_tiles, each a group of key tiles for 64 rows
// (decode/work_tiles.cuh). Each CTA has half of the outputs' columns, and scores every second tile for both
// (cta_pair_map.cuh). A warpgroup scores (cta_pair_score.cuh), a warpgroup has the outputs (cta_pair_outputs.cuh), a
// warp fetches (cta_pair_producer.cuh), and another one sends (cta_pair_send.cuh). So each column's chain of additions
// goes through the tiles in order, while the tensor cores of both CTAs have the scores of one tile and the outputs of
// another one to do.
#pragma once

#include "kernels/sm90/latent/cta_pair_dequantize.cuh"
#include "kernels/sm90/latent/cta_pair_outputs.cuh"
#include "kernels/sm90/latent/cta_pair_producer.cuh"
#include "kernels/sm90/latent/cta_pair_score.cuh"
#include "kernels/sm90/latent/cta_pair_send.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1)
    cta_pair_kernel(const __grid_constant__ typename C::Params of_launch) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = C::kFp8 ? 80 : 56;
  const DecodeParams& params = step_of(of_launch);
  const std::uint32_t rank = rank_in_cluster();
  const CtaPairMap map{in_cta(kReservedBytes, rank), rank};
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
      CtaPairDequantizer<C> dequantizer(of_launch, map);
      for_each_work_tile(map, dequantizer);
    }
  }
  // Nobody writes to a CTA that has gone: what the other one has sent has been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
