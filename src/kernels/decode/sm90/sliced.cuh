// SPDX-License-Identifier: Apache-2.0
// Decode of few rows, up to 16 for each KV head: a cluster of CTAs computes a work tile together, and each CTA has a
// slice of the output columns. The CTAs score the tiles in turn and exchange the probabilities through distributed
// shared memory. Each CTA then adds P V of every tile, in order, for its own columns. So the chain of additions of each
// output element is that of prefill. A cluster may be a single CTA.
//
// Tiles are thus scored before the tiles ahead of them are complete. This works because softmax_offsets rarely move:
// they are taken from the work tile's first tile, which every CTA scores for itself, or from the states of a prefix. If
// an offset moves or is set later, the work tile has failed. The cluster's first CTA recomputes failed work tiles tile
// by tile at the end, as decode_kernel does.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/decode/sm90/column_outputs.cuh"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/scorer.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"
#include "kernels/decode/sm90/sliced_outputs.cuh"

namespace ringattn::sm90 {

// Arrivals of a phase of each barrier. 0 stands for the writers of a V stage, which depend on the launch.
template <class C>
constexpr int sliced_arrivals(int barrier) {
  constexpr int kV = 2 * C::kKStages;
  constexpr int kScore = kV + 2 * C::kVStages;
  constexpr int kTurn = kScore + 3 * C::kScoreStages;
  static_assert(ColumnSliceMap<C>::kBarriers == kTurn + 14);
  if (barrier >= kTurn) {
    const int of = (barrier - kTurn) / 2;
    return of == 0 ? C::kScoringWarpgroupWarps : of == 3 ? C::kThreads / 32 - 1 : of == 5 ? C::kOutWarps : 1;
  }
  if (barrier >= kScore + 2 * C::kScoreStages) return C::kSlices * (C::kOutWarps + 1);
  if (barrier >= kScore) return barrier < kScore + C::kScoreStages ? C::kScoringWarpgroupWarps : 1;
  if (barrier >= kV) return barrier < kV + C::kVStages ? 0 : C::kOutWarps;
  return barrier < C::kKStages ? 1 : C::kScoringWarpgroupWarps;
}

// One thread calls it. It has no loop, so each barrier is one instruction with constant operands. mbarrier.init takes
// one address for the whole warp: lanes with different addresses would take turns, each after about ten instructions
// that look for lanes with equal ones.
template <class C>
__device__ __forceinline__ void init_sliced_barriers(const typename C::Params& params, const ColumnSliceMap<C>& map) {
  int fillers = 1;
  if constexpr (std::is_same_v<typename C::Params, SlicedParams>) fillers = params.v_slices.by_lanes ? 32 : 1;
  const auto init = [&]<int kBarrier>(std::integral_constant<int, kBarrier>) {
    constexpr int kArrivals = sliced_arrivals<C>(kBarrier);
    barrier_init(map.barrier(kBarrier), kArrivals == 0 ? fillers : kArrivals);
  };
  [&]<int... kBarrier>(std::integer_sequence<int, kBarrier...>) {
    (init(std::integral_constant<int, kBarrier>()), ...);
  }
  (std::make_integer_sequence<int, ColumnSliceMap<C>::kBarriers>());
  barrier_init_fence();
}

// The K producer warp posts WorkTileInfos, and all other warps go through them in order. Calls take(info, number) for
// each.
template <class C, class Visit>
__device__ __forceinline__ void for_each_work_tile(const ColumnSliceMap<C>& map, int first, int step,
                                                   const Visit& visit) {
  wait_for_cluster<C>();
  std::uint32_t infos = 0;
#pragma unroll 1
  for (int n = first;; n += step) {
    const PipelineStateAt<2> turn(infos++);
    const WorkTileInfo info = map.info(turn.index);
    barrier_wait(map.info_full(turn.index), turn.parity);
    if (info.get(WorkTileInfo::kBegin) == WorkTileInfo::kNoMore) break;
    visit(info, n);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.info_empty(turn.index));
  }
}

// Registers of a thread by role if there are several scoring warpgroups: warps with outputs need more than an even
// share.
inline constexpr int kScoringRegisters = 120;
inline constexpr int kOutputRegisters = 192;
inline constexpr int kSliceHelperRegisters = 80;

// Sets a role's register count kCount in its scope, and the common count again at its end.
template <class C, int kCount>
class RoleRegisters {
 public:
  __device__ __forceinline__ RoleRegisters() {
    if constexpr (kMoves) change_registers<kCount, kAll>();
  }
  __device__ __forceinline__ ~RoleRegisters() {
    if constexpr (kMoves) {
      __syncwarp();
      change_registers<kAll, kCount>();
    }
  }
  RoleRegisters(const RoleRegisters&) = delete;
  RoleRegisters& operator=(const RoleRegisters&) = delete;

 private:
  static constexpr bool kMoves = C::kScoringWarpgroups > 1;
  static constexpr int kAll = 65536 / C::kThreads / 8 * 8;
  static_assert(!kMoves ||
                kScoringRegisters * C::kScoreWarps + kOutputRegisters * C::kOutWarps + kSliceHelperRegisters * 4 <=
                    kAll * (C::kThreads / 32));
};

// The roles of a CTA's warps between the first and last cluster barriers. keys(), make_outputs() and boxes(), which is
// told whether it is for V, make the sources of tiles (TileKeys, ColumnOutputs, TileBoxes). One thread of the CTA calls
// fails() for a failed work tile.
template <class C, class Keys, class MakeOutputs, class Boxes, class Fails>
__device__ __forceinline__ void decode_sliced(const typename C::Params& params, const ColumnSliceMap<C>& map,
                                              std::uint32_t rank, const ClusterWorkTiles& work, const Keys& keys,
                                              const MakeOutputs& make_outputs, const Boxes& boxes, const Fails& fails) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Always inlined: otherwise a warp's register arrays would be in local memory.
  const auto each_work_tile = [&](auto visit) __attribute__((always_inline)) {
    for_each_work_tile<C>(map, work.first, work.step, visit);
  };
  if (warp < C::kScoreWarps) {
    const RoleRegisters<C, kScoringRegisters> registers;
    Scorer<C, decltype(keys())> scorer(params, map, rank, keys());
    each_work_tile([&](const WorkTileInfo& info, int) { scorer.process(info); });
    scorer.drain();
  } else if (warp < C::kScoreWarps + C::kOutWarps) {
    const RoleRegisters<C, kOutputRegisters> registers;
    auto outputs = make_outputs();
    each_work_tile([&](const WorkTileInfo& info, int number) __attribute__((always_inline)) {
      const bool failed = outputs.process(info);
      if (!outputs.is_leader()) return;
      if (failed) fails();
      if (rank == 0) __stcg(params.failed + number, failed ? 1 : 0);
    });
  } else {
    const RoleRegisters<C, kSliceHelperRegisters> registers;
    if (warp == C::kScoreWarps + C::kOutWarps) {
      SumReducer<C> reducer(map, rank);
      each_work_tile([&](const WorkTileInfo& info, int) { reducer.process(info); });
    } else if (warp == C::kScoreWarps + C::kOutWarps + 1) {
      SumAdder<C> adder(params, map);
      each_work_tile([&](const WorkTileInfo& info, int) { adder.process(info); });
    } else if (warp == C::kScoreWarps + C::kOutWarps + 2) {
      ValueProducer<C, decltype(boxes(std::true_type()))> producer(map, rank, boxes(std::true_type()));
      each_work_tile([&](const WorkTileInfo& info, int) { producer.process(info); });
    } else {
      KeyProducer<C, decltype(boxes(std::false_type()))> producer(params, map, rank, boxes(std::false_type()));
      producer.run(work.first, work.step);
      wait_for_cluster<C>();
    }
  }
}

// Reinitializes shared memory to recompute work tiles tile by tile. All threads of a CTA call it when its other work is
// complete. One thread calls forget(), which invalidates the old barriers.
template <class Whole, class Forget>
__device__ __forceinline__ void lay_out_whole(const typename Whole::Params& params, const DecodeMap<Whole>& map,
                                              const Forget& forget) {
  __syncthreads();  // all threads have read any_failed(), whose memory is reused
  if (threadIdx.x == 0) {
    forget();
    init_decode_barriers(map);
    proxy_fence();
  }
  if (threadIdx.x < 32) count_work_tiles<Whole>(params, map);
  __syncthreads();
}

// One CTA recomputes the failed ones of the work tiles first, first + step, … Not inlined, so that its registers don't
// count for the other code.
template <class C>
__device__ __noinline__ void recompute_failed(const SlicedParams& params, int first, int step) {
  using Whole = typename C::Whole;
  const DecodeMap<Whole> map;
  lay_out_whole(params, map, [] {
    const ColumnSliceMap<C> before;
    for (std::uint32_t i = 0; i < ColumnSliceMap<C>::kBarriers; ++i) barrier_invalidate(before.k_full(i));
  });
  const int work_tiles = work_tile_count(params, map);
  const auto each_work_tile = [&](auto&& worker) {
    for (int n = first; n < work_tiles; n += step) {
      if (__ldcg(params.failed + n) != 0) worker.process(work_tile_of<Whole>(params, map, n));
    }
  };
  if (threadIdx.x < kDecodeConsumerThreads) {
    each_work_tile(Decoder<Whole>(params, map));
  } else if (threadIdx.x / 32 == kDecodeConsumerThreads / 32) {
    each_work_tile(TileProducer<Whole>(params, map));
  }
}

// With the most slices, the few columns of a CTA are the M of its mma.
template <class C>
__device__ __forceinline__ auto outputs_by_slices(const SlicedParams& params, const ColumnSliceMap<C>& map,
                                                  std::uint32_t rank) {
  if constexpr (C::kSlices == kMaxSlices) {
    return ColumnOutputs<C>(params, map, rank, TileColumns<C>(map));
  } else {
    return RowOutputs<C>(params, map, rank);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sliced_kernel(const __grid_constant__ SlicedParams params) {
  const ColumnSliceMap<C> map;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers(params, map);
    store_number(map.any_failed(), 0);
  }
  cuda::pdl_launch_dependents();
  ClusterWorkTiles work = cluster_work_tiles<C>();
  if (params.late > 0 && !any_partial_split<C>(params)) {
    work.step -= params.late;
    if (work.first >= work.step) return;
  }
  __syncthreads();
  arrive_in_cluster<C, false>();  // warps that write to other CTAs wait for this arrival of all
  decode_sliced<C>(
      params, map, rank, work, [&] { return TileKeys<C>(map); },
      [&] { return outputs_by_slices<C>(params, map, rank); }, [&](auto) { return TileBoxes<C>(params); },
      [&] { store_number(map.any_failed(), 1); });
  await_prefixes(params);
  __syncthreads();
  if (load_number(map.any_failed()) == 0) return;
  // All CTAs of the cluster get here, since they have the same flags. Their results for failed work tiles are
  // overwritten.
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
  if (rank == 0) recompute_failed<C>(params, work.first, work.step);
}

}  // namespace ringattn::sm90
