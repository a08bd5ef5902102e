// SPDX-License-Identifier: Apache-2.0
// Decoding of few rows, up to 16 of a KV head: a cluster of CTAs folds a unit together, each CTA some columns of the
// outputs. The CTAs score the unit's tiles in turn, and hand the probabilities to each other through their shared
// memory; each then adds P V of every tile, in order, for its own columns. So the chain of additions of each output is
// the fold's. A cluster may be one CTA, which then does all of it.
//
// For that, a tile must be scored before the tiles ahead of it are. It can be, as references hardly ever move: they are
// taken from the unit's first tile, which every CTA scores for itself. A unit in which one moves, or is set later, has
// failed; when the others are done, the cluster's first CTA folds it tile by tile, as decode_kernel does.
#pragma once

#include "kernels/sm90/decode/decoder.cuh"
#include "kernels/sm90/decode/fetch.cuh"
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
    barrier_init(map.numbers_full(i), 1);
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

// Of a cluster's units, from `first` on in steps of `step`, those that have failed, by one CTA. Nothing else is going
// on in it any more; its shared memory is laid out anew. A function of its own, so that its registers are not the
// others'.
template <class C>
__device__ __noinline__ void fold_failed_units(const DecodeParams& params, int first, int step) {
  using Whole = typename C::Whole;
  const DecodeMap<Whole> map;
  __syncthreads();
  if (threadIdx.x == 0) {
    const SlicedMap<C> before;
    for (std::uint32_t i = 0; i < SlicedMap<C>::kBarriers; ++i) barrier_forget(before.k_full(i));
    init_decode_barriers(map);
    proxy_fence();
  }
  count_units<Whole>(params, map);
  const int units = unit_count(params, map);
  const auto each_unit = [&](auto&& worker) {
    for (int n = first; n < units; n += step) {
      if (__ldcg(params.failed + n) != 0) worker.take(unit_of<Whole>(params, map, n));
    }
  };
  if (threadIdx.x < kDecodeFoldThreads) {
    each_unit(Decoder<Whole>(params, map));
  } else if (threadIdx.x / 32 == blockDim.x / 32 - 1) {
    each_unit(Fetcher<Whole>(params, map));
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sliced_kernel(const __grid_constant__ DecodeParams params) {
  static_assert(32 * kScoreWarps == kDecodeFoldThreads);
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
  const auto each_unit = [&](auto fold) {
    for (int n = first; n < units; n += step) fold(unit_of<C>(params, map, n));
  };
  if (warp < kScoreWarps) {
    Scorer<C> scorer(params, map, rank);
    each_unit([&](const DecodeUnit& unit) {
      if (unit.begin < unit.end) scorer.score(unit);
    });
  } else if (warp < kScoreWarps + C::kOutWarps) {
    SlicedOutputs<C> outputs(params, map, rank);
    each_unit([&](const DecodeUnit& unit) {
      const bool failed = outputs.fold(unit);
      if (warp != kScoreWarps || threadIdx.x % 32 != 0) return;
      if (failed) store_number(map.any_failed(), 1);
      if (rank == 0) __stcg(params.failed + unit.number, failed ? 1 : 0);
    });
  } else {
    SlicedFetcher<C> fetcher(params, map, rank);
    each_unit([&](const DecodeUnit& unit) {
      if (unit.begin < unit.end) fetcher.fetch(unit);
    });
  }
  sync_cluster<C>();  // nobody's shared memory is written any more
  if (rank == 0 && load_number(map.any_failed()) != 0) fold_failed_units<C>(params, first, step);
}

}  // namespace ringattn::sm90
