// SPDX-License-Identifier: Apache-2.0
// Decoding of few rows, up to 16 of a KV head, and of few units: a cluster of CTAs folds a unit together, each CTA some
// columns of the outputs. The CTAs score the unit's tiles in turn, and hand the probabilities to each other through
// their shared memory; each then adds P V of every tile, in order, for its own columns. So the chain of additions of
// each output is the fold's.
//
// For that, a tile must be scored before the tiles ahead of it are. It can be, as references hardly ever move: they are
// taken from the unit's first tile, which every warp scores for itself. A unit in which one moves, or is set later, has
// failed; when the others are done, it is folded once more, tile by tile.
#pragma once

#include "kernels/sm90/decode/scorer.cuh"
#include "kernels/sm90/decode/sliced_fetch.cuh"
#include "kernels/sm90/decode/sliced_outputs.cuh"

namespace ringattn::sm90 {

template <class C>
__device__ __forceinline__ void init_sliced_barriers(const SlicedMap<C>& map) {
  for (std::uint32_t i = 0; i < C::kKStages; ++i) {
    barrier_init(map.k_full(i), 1);
    barrier_init(map.k_empty(i), kScoreWarps);
  }
  for (std::uint32_t i = 0; i < C::kVStages; ++i) {
    barrier_init(map.v_full(i), 1);
    barrier_init(map.v_empty(i), C::kOutWarps);
  }
  for (std::uint32_t i = 0; i < C::kSlots; ++i) {
    barrier_init(map.slot_full(i), 1);
    barrier_init(map.slot_empty(i), C::kSlices * C::kOutWarps);
  }
  barrier_init_fence();
}

template <class C>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (C::kSlices > 1) {
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sliced_kernel(const __grid_constant__ DecodeParams params) {
  const SlicedMap<C> map;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers(map);
    store_number(map.any_failed(), 0);
  }
  count_units<C>(params, map);
  sync_cluster<C>();
  const int units = unit_count(params, map);
  const int first = static_cast<int>(blockIdx.x) / C::kSlices;
  const int step = static_cast<int>(gridDim.x) / C::kSlices;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  // Calls fold(unit) for each unit of this cluster; `again`: for those that failed.
  const auto each_unit = [&](bool again, auto fold) {
    for (int n = first; n < units; n += step) {
      if (again && __ldcg(params.failed + n) == 0) continue;
      fold(unit_of<C>(params, map, n));
    }
  };
  // The same for all kinds of warps: first every unit, then the failed ones.
  const auto both_times = [&](auto& worker, auto fold) {
    each_unit(false, [&](const DecodeUnit& unit) { fold(unit, false); });
    sync_cluster<C>();
    if (load_number(map.any_failed()) != 0) {
      if (threadIdx.x == 0) {
        for (std::uint32_t i = 0; i < SlicedMap<C>::kBarriers; ++i) barrier_forget(map.k_full(i));
        init_sliced_barriers(map);
      }
      sync_cluster<C>();
      worker.begin_again();
      each_unit(true, [&](const DecodeUnit& unit) { fold(unit, true); });
      sync_cluster<C>();
    }
  };
  if (warp < kScoreWarps) {
    Scorer<C> scorer(params, map, rank);
    both_times(scorer, [&](const DecodeUnit& unit, bool again) {
      if (unit.begin == unit.end) return;
      if (again) {
        scorer.score_in_order(unit);
      } else {
        scorer.score(unit);
      }
    });
  } else if (warp < kScoreWarps + C::kOutWarps) {
    SlicedOutputs<C> outputs(params, map, rank);
    both_times(outputs, [&](const DecodeUnit& unit, bool again) {
      const bool failed = outputs.fold(unit, again);
      if (again || warp != kScoreWarps || threadIdx.x % 32 != 0) return;
      if (failed) store_number(map.any_failed(), 1);
      if (rank == 0) __stcg(params.failed + unit.number, failed ? 1 : 0);
    });
  } else {
    SlicedFetcher<C> fetcher(params, map, rank);
    both_times(fetcher, [&](const DecodeUnit& unit, bool again) {
      if (unit.begin < unit.end) fetcher.fetch(unit, again);
    });
  }
}

}  // namespace ringattn::sm90
