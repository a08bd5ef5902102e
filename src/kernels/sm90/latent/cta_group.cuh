// SPDX-License-Identifier: Apache-2.0
// Decoding over latents by three or four CTAs a work_tile, a cta_group, where work_tiles are few: as pairs
// (cta_pair.cuh), but each CTA scores every third or fourth tile and has a third or a quarter of the outputs' columns
// (cta_group_map.cuh). A cluster is a cta_group, or two cta_groups for two blocks of rows of the same keys, each read
// once for both. A warpgroup scores, a warpgroup has the outputs, two warps fetch (cta_group_producer.cuh) and one
// sends (cta_group_score.cuh).
#pragma once

#include "kernels/sm90/latent/cta_group_outputs.cuh"
#include "kernels/sm90/latent/cta_group_producer.cuh"
#include "kernels/sm90/latent/cta_group_score.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) cta_group_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = 80;
  const std::uint32_t rank = rank_in_cluster();
  using Map = typename C::Map;
  const Map map{in_cta(kReservedBytes, rank), rank % Map::kCtas, rank / Map::kCtas, ctas_of_cluster() / Map::kCtas};
  if (threadIdx.x == 0) init_cta_group_barriers(map);
  cuda::pdl_launch_dependents();
  __syncthreads();
  cluster_sync();
  cuda::pdl_wait();
  if (threadIdx.x < kWarpgroup) {
    reg_alloc<kScoreRegisters>();
    CtaGroupScorer<C> scorer(params, map);
    for_each_work_tile(map, scorer);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    reg_alloc<kMlaRegisters - kScoreRegisters - kOtherRegisters>();
    CtaGroupOutputs<C> outputs(params, map);
    for_each_work_tile(map, outputs);
  } else {
    reg_dealloc<kOtherRegisters>();
    const auto warp = static_cast<int>(threadIdx.x / 32) - 2 * kWarpgroup / 32;
    if (warp == 0) {
      // Units of two blocks of rows rescale_to each other.
      constexpr int kCtas = Map::kCtas;
      CtaGroupKeyProducer<C>(params, map)
          .run(static_cast<int>(blockIdx.x) / kCtas, static_cast<int>(gridDim.x) / kCtas);
    } else if (warp == 1) {
      CtaGroupSender<Map> sender(map);
      for_each_work_tile(map, sender);
    } else if (warp == 2) {
      CtaGroupValueProducer<C> values(params, map);
      for_each_work_tile(map, values);
    }
  }
  // Nobody writes to a CTA that has gone: what others have sent has been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
