// SPDX-License-Identifier: Apache-2.0
// MLA decode with a CTA group of three or four CTAs per work tile, for launches with few work tiles. As in CTA pairs
// (cta_pair.cuh), but each CTA scores every third or fourth tile and has a third or a quarter of the output columns
// (cta_group_map.cuh). A cluster is one CTA group, or two for two row blocks of the same keys, which are then loaded
// once for both. One warpgroup computes scores (cta_group_score.cuh), one the outputs (cta_group_outputs.cuh), two
// warps are producers (cta_group_producer.cuh), and one sends probabilities (cta_group_score.cuh).
#pragma once

#include "kernels/mla/sm90/cta_group_outputs.cuh"
#include "kernels/mla/sm90/cta_group_producer.cuh"
#include "kernels/mla/sm90/cta_group_score.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) cta_group_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = 80;
  const std::uint32_t rank = rank_in_cluster();
  using Map = typename C::Map;
  const Map map{map_to_cta(kReservedBytes, rank), rank % Map::kCtas, rank / Map::kCtas, cluster_size() / Map::kCtas};
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
      // The work tiles of two row blocks have consecutive numbers, so both CTA groups of a cluster use the same keys.
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
  // DSMEM of a CTA must not be accessed after it exits. All stores that other CTAs sent here have been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
