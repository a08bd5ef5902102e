// SPDX-License-Identifier: Apache-2.0
// Decoding over latents by three or four CTAs a unit, a team, where units are few: as pairs (pair.cuh), but each CTA
// scores every third or fourth tile and has a third or a quarter of the outputs' columns (team_map.cuh). A cluster is a
// team, or two teams for two blocks of rows of the same keys, each read once for both.
// A warpgroup scores, a warpgroup has the outputs, two warps fetch (team_fetch.cuh) and one sends (team_score.cuh).
#pragma once

#include "kernels/sm90/latent/team_fetch.cuh"
#include "kernels/sm90/latent/team_outputs.cuh"
#include "kernels/sm90/latent/team_score.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kLatentThreads, 1) team_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = 80;
  const std::uint32_t rank = rank_in_cluster();
  using Map = typename C::Map;
  const Map map{in_cta(kReservedBytes, rank), rank % Map::kCtas, rank / Map::kCtas, ctas_of_cluster() / Map::kCtas};
  if (threadIdx.x == 0) init_team_barriers(map);
  cuda::let_next_begin();
  __syncthreads();
  cluster_sync();
  cuda::await_kernels_before();
  if (threadIdx.x < kWarpgroup) {
    take_registers<kScoreRegisters>();
    TeamScorer<C> scorer(params, map);
    for_each_note(map, scorer);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    take_registers<kLatentRegisters - kScoreRegisters - kOtherRegisters>();
    TeamOutputs<C> outputs(params, map);
    for_each_note(map, outputs);
  } else {
    give_registers<kOtherRegisters>();
    const auto warp = static_cast<int>(threadIdx.x / 32) - 2 * kWarpgroup / 32;
    if (warp == 0) {
      // Units of two blocks of rows follow each other.
      constexpr int kCtas = Map::kCtas;
      TeamKeyFetcher<C>(params, map).run(static_cast<int>(blockIdx.x) / kCtas, static_cast<int>(gridDim.x) / kCtas);
    } else if (warp == 1) {
      TeamSender<Map> sender(map);
      for_each_note(map, sender);
    } else if (warp == 2) {
      TeamValueFetcher<C> values(params, map);
      for_each_note(map, values);
    }
  }
  // Nobody writes to a CTA that has gone: what others have sent has been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
