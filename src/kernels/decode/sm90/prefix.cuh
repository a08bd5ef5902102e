// SPDX-License-Identifier: Apache-2.0
// Computes the KV splits of shared prefixes once for all sequences that share them (cascade attention): rows of many
// sequences are packed into one M. A work tile stores its rows' partials. For a split that continues after the prefix
// it stores their states, from which the next launch resumes. That launch stores the partials of each sequence's own
// splits, and a merge finishes the rows.
//
// There are few work tiles, so the latency of each counts. Two warpgroups score tiles in turn and write the
// probabilities to shared memory; only one does if the accumulators leave no registers for two. Another warpgroup adds
// P V of all tiles, in order. So the tensor cores have work during the softmax. The arithmetic is prefill's: the same
// functions on the same fragments, in the same order.
//
// If there are enough multiprocessors, a CTA pair (a cluster of two) computes a work tile. Each CTA scores every second
// tile, sends the probabilities to both, and has half of the output columns. So each column's chain of additions also
// goes through all tiles in order.
//
// Tiles are thus scored before the tiles ahead of them are complete. This works because softmax_offsets rarely move:
// they are taken from a work tile's first tile, which both CTAs of a pair score. If an offset moves, or is not set by
// then, the CTA, or the first one of the pair, recomputes its work tiles tile by tile (prefix_whole.cuh), which writes
// the same partials for work tiles that had not failed.
#pragma once

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/decode/sm90/fetch.cuh"
#include "kernels/decode/sm90/prefix_outputs.cuh"
#include "kernels/decode/sm90/prefix_score.cuh"
#include "kernels/decode/sm90/prefix_whole.cuh"

namespace ringattn::sm90 {

// Threads of a CTA: one output warpgroup, the scoring warpgroups, and one of which two warps load and the others exit.
// kPrefixWarps counts the warps that stay.
template <class C>
inline constexpr int kPrefixThreads = (2 + C::kScorers) * kWarpgroup;
template <class C>
inline constexpr int kPrefixWarps = (1 + C::kScorers) * kWarpgroup / 32 + 2;

// Registers of a thread by role. The scoring warpgroups release theirs when they are done.
template <class C>
struct PrefixRegisters {
  static constexpr int kOutputs = C::kSlices > 1 ? 112 : C::kScorers == 1 ? 208 : 176;
  static constexpr int kScores = C::kSlices > 1 ? 176 : C::kScorers == 1 ? 208 : 144;
  static constexpr int kFetch = C::kSlices > 1 ? 48 : 40;
  static constexpr int kWhole = 240;
  static constexpr int kLaunched = 65536 / kPrefixThreads<C> / 8 * 8;  // registers of a thread at launch
  static constexpr int kAll = kLaunched * (2 + C::kScorers);
  static_assert(kOutputs + C::kScorers * kScores + kFetch <= kAll);
  static_assert(kWhole + (1 + C::kScorers) * kFetch <= kAll);
  // Sums of two tiles are buffered: one tile's are read before those of the next but one are written. A pair buffers as
  // many sums as probabilities, which become free at the same time.
  static_assert(C::kScorers == 1 || C::kSlices > 1 || C::kStages % 2 == 0 || C::kPanels <= 3);
};

template <class C>
__device__ __forceinline__ void init_prefix_barriers(const PrefixMap<C>& map) {
  for (std::uint32_t i = 0; i < PrefixMap<C>::kPanels; ++i) {
    barrier_init(map.panel_full(i), kWarpgroup / 32);
    barrier_init(map.panel_empty(i), C::kSlices * kWarpgroup / 32);
  }
  // Every thread arrives and, from the other CTA of a pair, one lane of every warp.
  barrier_init(map.done(), (32 + C::kSlices - 1) * kPrefixWarps<C>);
  if constexpr (C::kSlices > 1) barrier_init(map.laid_out(), 32);
  init_decode_barriers<C>(map);
}

// Reinitializes the shared memory of a pair's first CTA to recompute work tiles. The K producer warp calls it when the
// CTA's other work is complete.
template <class C>
__device__ __forceinline__ void lay_out_whole(const DecodeParams& params, const PrefixMap<C>& before,
                                              const PrefixMap<typename C::Whole>& map) {
  if (elect_one()) {
#pragma unroll 1
    for (std::uint32_t i = 0; i < 4 * C::kStages; ++i) barrier_invalidate(before.k_full(i));
#pragma unroll 1
    for (std::uint32_t i = 0; i < 2 * C::kPanels; ++i) barrier_invalidate(before.panel_full(i));
    init_decode_barriers<typename C::Whole>(map);
    proxy_fence();
  }
  __syncwarp();
  collect_members<typename C::Whole>(params, map);
  barrier_arrive(before.laid_out());
}

template <class C>
__global__ void __launch_bounds__(kPrefixThreads<C>, 1) prefix_kernel(const __grid_constant__ DecodeParams params) {
  constexpr bool kPairs = C::kSlices > 1;
  using Whole = typename C::Whole;
  using Registers = PrefixRegisters<C>;
  const PrefixMap<C> map;
  const int rank = kPairs ? static_cast<int>(rank_in_cluster()) : 0;
  constexpr int kFetchWarp = (1 + C::kScorers) * kWarpgroup / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    init_prefix_barriers<C>(map);
    store_number(map.failed(), 0);
  }
  arrive_in_cluster<C, true>();  // warps that write to the peer CTA wait for this arrival of both
  if (warp == kFetchWarp) prefetch_metadata(params);
  cuda::pdl_wait();
  // The next launch waits before it reads what this one writes. What earlier launches have written is visible by now.
  cuda::pdl_launch_dependents();
  if (warp == kFetchWarp) collect_members<C>(params, map);
  __syncthreads();
  wait_for_cluster<C>();
  const ClusterWorkTiles work = cluster_work_tiles<C>();
  const auto each_work_tile = [&](const auto& of_map, auto&& visit) {
    const int work_tiles = load_number(of_map.work_tiles_before(params.prefixes));
#pragma unroll 1
    for (int n = work.first; n < work_tiles; n += work.step) visit(prefix_work_tile_of(params, of_map, n));
  };
  // Once all work tiles are complete, those of the peer CTA too, every thread knows whether one has failed, and no CTA
  // writes to one that has exited. Warps call this in different branches, where a barrier of the whole CTA is not
  // possible.
  const auto any_failed = [&] {
    if constexpr (kPairs) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_release_at(map_to_cta(map.done(), 1U - static_cast<std::uint32_t>(rank)));
    }
    barrier_arrive(map.done());
    if constexpr (kPairs) {
      barrier_acquire(map.done(), 0);
    } else {
      barrier_wait(map.done(), 0);
    }
    return load_number(map.failed()) != 0 && rank == 0;
  };
  // In a pair, tiles have a different layout for recomputing. The warps wait until one warp has initialized it.
  const PrefixMap<Whole> recompute_map;
  const auto await_layout = [&] {
    if constexpr (kPairs) barrier_wait(map.laid_out(), 0);
  };
  if (warp < kWarpgroup / 32) {
    change_registers<Registers::kOutputs, Registers::kLaunched>();
    PrefixOutputs<C> outputs(params, map, rank);
    each_work_tile(map, [&](const PrefixWorkTile& work_tile) { outputs.process(work_tile); });
    if (!any_failed()) return;
    reg_alloc<Registers::kWhole>();
    await_layout();
    PrefixConsumer<Whole> consumer(params, recompute_map, [&] {
      if constexpr (kPairs)
        return PackedPipelineState<Whole::kStages>();
      else
        return outputs.ring();
    }());
    each_work_tile(recompute_map, [&](const PrefixWorkTile& work_tile) { consumer.process(work_tile); });
  } else if (warp < kFetchWarp) {
    change_registers<Registers::kScores, Registers::kLaunched>();
    PrefixScorer<C> scorer(params, map, rank, warp / (kWarpgroup / 32) - 1);
    each_work_tile(map, [&](const PrefixWorkTile& work_tile) { scorer.process(work_tile); });
    if (!any_failed()) return;
    reg_dealloc<Registers::kFetch>();
  } else {
    reg_dealloc<Registers::kFetch>();
    const auto refetch = [&]<FetchedParts kParts>(TileProducer<C, kParts>& producer) {
      if constexpr (kPairs) {
        TileProducer<Whole, kParts> whole_producer(params, recompute_map);
        each_work_tile(recompute_map,
                       [&](const PrefixWorkTile& work_tile) { whole_producer.process(work_tile.decode_tile); });
      } else {
        each_work_tile(map, [&](const PrefixWorkTile& work_tile) { producer.process(work_tile.decode_tile); });
      }
    };
    if (warp == kFetchWarp) {
      TileProducer<C, FetchedParts::kKeys> producer(params, map);
      each_work_tile(map, [&](const PrefixWorkTile& work_tile) {
        producer.process(work_tile.decode_tile, 0, scored_tiles<C>(rank, work_tile.turns<C>()),
                         [&](int nth) { return work_tile.tile_at(scored_tile<C>(rank, nth)); });
      });
      if (!any_failed()) return;
      if constexpr (kPairs) lay_out_whole<C>(params, map, recompute_map);
      refetch(producer);
    } else if (warp == kFetchWarp + 1) {
      TileProducer<C, FetchedParts::kValues> producer(params, map, rank * C::kDimV);
      each_work_tile(map, [&](const PrefixWorkTile& work_tile) {
        producer.process(work_tile.decode_tile);
        producer.process(work_tile.decode_tile, work_tile.tiles(), work_tile.turns<C>(),
                         [&](int) { return work_tile.decode_tile.end - 1; });
      });
      if (!any_failed()) return;
      await_layout();
      refetch(producer);
    }
  }
}

}  // namespace ringattn::sm90
