// SPDX-License-Identifier: Apache-2.0
// Decoding of few rows, up to 16 of a KV head: a cluster of CTAs folds a work_tile together, each CTA some columns of
// the outputs. The CTAs score the work_tile's tiles in turn, and hand the probabilities to each other through their
// shared memory; each then adds P V of every tile, in order, for its own columns. So the chain of additions of each
// output is the fold's. A cluster may be one CTA, which then does all of it.
//
// For that, a tile must be scored before the tiles ahead of it are. It can be, as softmax_offsets hardly ever move:
// they are taken from the work_tile's first tile, which every CTA scores for itself; where a work_tile goes on from the
// states of a prefix, they come from there. A work_tile in which one moves, or is set later, has failed; when the
// others are done, the cluster's first CTA folds it tile by tile, as decode_kernel does.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/cuda/device/pdl.cuh"
#include "kernels/sm90/decode/column_outputs.cuh"
#include "kernels/sm90/decode/decoder.cuh"
#include "kernels/sm90/decode/fetch.cuh"
#include "kernels/sm90/decode/scorer.cuh"
#include "kernels/sm90/decode/sliced_fetch.cuh"
#include "kernels/sm90/decode/sliced_outputs.cuh"
#include "kernels/sm90/decode/sliced_sums.cuh"

namespace ringattn::sm90 {

// How many arrivals end a phase of a barrier; 0: as many as fill a stage of values, which is up to the launch.
template <class C>
constexpr int sliced_arrivals(int barrier) {
  constexpr int kV = 2 * C::kKStages;
  constexpr int kSlot = kV + 2 * C::kVStages;
  constexpr int kTurn = kSlot + 3 * C::kScoreStages;
  static_assert(SlicedMap<C>::kBarriers == kTurn + 14);
  if (barrier >= kTurn) {
    const int of = (barrier - kTurn) / 2;
    return of == 0 ? C::kScoringWarpgroupWarps : of == 3 ? C::kThreads / 32 - 1 : of == 5 ? C::kOutWarps : 1;
  }
  if (barrier >= kSlot + 2 * C::kScoreStages) return C::kSlices * (C::kOutWarps + 1);
  if (barrier >= kSlot) return barrier < kSlot + C::kScoreStages ? C::kScoringWarpgroupWarps : 1;
  if (barrier >= kV) return barrier < kV + C::kVStages ? 0 : C::kOutWarps;
  return barrier < C::kKStages ? 1 : C::kScoringWarpgroupWarps;
}

// By one thread, and without a loop: a barrier is then one instruction, whose coord and arrivals are constants. The
// instruction takes one address for the whole warp, so lanes that have different ones would take turns, each after some
// ten instructions that look for lanes with the same.
template <class C>
__device__ __forceinline__ void init_sliced_barriers(const DecodeParams& params, const SlicedMap<C>& map) {
  const int fillers = params.values_by_lanes ? 32 : 1;
  const auto init = [&]<int kBarrier>(std::integral_constant<int, kBarrier>) {
    constexpr int kArrivals = sliced_arrivals<C>(kBarrier);
    barrier_init(map.barrier(kBarrier), kArrivals == 0 ? fillers : kArrivals);
  };
  [&]<int... kBarrier>(std::integer_sequence<int, kBarrier...>) {
    (init(std::integral_constant<int, kBarrier>()), ...);
  }
  (std::make_integer_sequence<int, SlicedMap<C>::kBarriers>());
  barrier_init_fence();
}

// The fetching warp finds out about work_tiles and tells the other warps, which all go through the same ones. Calls
// take(info, number) for each.
template <class C, class Take>
__device__ __forceinline__ void for_each_work_tile(const SlicedMap<C>& map, int first, int step, const Take& take) {
  wait_for_cluster<C>();
  std::uint32_t notes = 0;
#pragma unroll 1
  for (int n = first;; n += step) {
    const PipelineStateAt<2> turn(notes++);
    const WorkTileInfo info = map.info(turn.index);
    barrier_wait(map.info_full(turn.index), turn.parity);
    if (info.get(WorkTileInfo::kBegin) == WorkTileInfo::kNoMore) break;
    take(info, n);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.info_empty(turn.index));
  }
}

// Registers of a thread, where warps of several scoring_warpgroups_count score: those with outputs need more than there
// are for each.
inline constexpr int kScoringRegisters = 120;
inline constexpr int kOutputRegisters = 192;
inline constexpr int kSliceHelperRegisters = 80;

// kCount of the registers that a thread has for its part, and all of them the same behind it.
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

// What a CTA's warps do between its cluster's first and last meeting, each its part. keys(), make_outputs() and
// boxes(), which is told whether it is for values, make what tiles come from and go through (TileKeys, ColumnOutputs,
// TileBoxes); one thread of the CTA calls fails() for a work_tile that has failed.
template <class C, class Keys, class MakeOutputs, class Boxes, class Fails>
__device__ __forceinline__ void decode_sliced(const DecodeParams& params, const SlicedMap<C>& map, std::uint32_t rank,
                                              const SlicedWork& work, const Keys& keys, const MakeOutputs& make_outputs,
                                              const Boxes& boxes, const Fails& fails) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Were these no parts of the kernel, all that a warp has in registers would lie in memory.
  const auto each_work_tile = [&](auto take) __attribute__((always_inline)) {
    for_each_work_tile<C>(map, work.first, work.step, take);
  };
  if (warp < C::kScoreWarps) {
    const RoleRegisters<C, kScoringRegisters> registers;
    Scorer<C, decltype(keys())> scorer(params, map, rank, keys());
    each_work_tile([&](const WorkTileInfo& info, int) { scorer.take(info); });
    scorer.drain();
  } else if (warp < C::kScoreWarps + C::kOutWarps) {
    const RoleRegisters<C, kOutputRegisters> registers;
    auto outputs = make_outputs();
    each_work_tile([&](const WorkTileInfo& info, int number) __attribute__((always_inline)) {
      const bool failed = outputs.take(info);
      if (!outputs.is_leader()) return;
      if (failed) fails();
      if (rank == 0) __stcg(params.failed + number, failed ? 1 : 0);
    });
  } else {
    const RoleRegisters<C, kSliceHelperRegisters> registers;
    if (warp == C::kScoreWarps + C::kOutWarps) {
      SumReducer<C> maker(map, rank);
      each_work_tile([&](const WorkTileInfo& info, int) { maker.take(info); });
    } else if (warp == C::kScoreWarps + C::kOutWarps + 1) {
      SumAdder<C> adder(params, map);
      each_work_tile([&](const WorkTileInfo& info, int) { adder.take(info); });
    } else if (warp == C::kScoreWarps + C::kOutWarps + 2) {
      ValueProducer<C, decltype(boxes(std::true_type()))> producer(map, rank, boxes(std::true_type()));
      each_work_tile([&](const WorkTileInfo& info, int) { producer.take(info); });
    } else {
      KeyProducer<C, decltype(boxes(std::false_type()))> producer(params, map, rank, boxes(std::false_type()));
      producer.run(work.first, work.step);
      wait_for_cluster<C>();
    }
  }
}

// By all threads of a CTA in which nothing else is going on any more: its shared memory is laid out anew, for
// work_tiles that are folded tile by tile. forget(), which one thread calls, forgets the barriers that lay there.
template <class Whole, class Forget>
__device__ __forceinline__ void lay_out_whole(const DecodeParams& params, const DecodeMap<Whole>& map,
                                              const Forget& forget) {
  __syncthreads();  // everyone has read that work_tiles have failed, which lies where other things come now
  if (threadIdx.x == 0) {
    forget();
    init_decode_barriers(map);
    proxy_fence();
  }
  if (threadIdx.x < 32) count_work_tiles<Whole>(params, map);
  __syncthreads();
}

// Of a cluster's work_tiles, from `first` on in steps of `step`, those that have failed, by one CTA. A function of its
// own, so that its registers are not the others'.
template <class C>
__device__ __noinline__ void recompute_failed_tiles(const DecodeParams& params, int first, int step) {
  using Whole = typename C::Whole;
  const DecodeMap<Whole> map;
  lay_out_whole(params, map, [] {
    const SlicedMap<C> before;
    for (std::uint32_t i = 0; i < SlicedMap<C>::kBarriers; ++i) barrier_invalidate(before.k_full(i));
  });
  const int work_tiles = work_tile_count(params, map);
  const auto each_work_tile = [&](auto&& worker) {
    for (int n = first; n < work_tiles; n += step) {
      if (__ldcg(params.failed + n) != 0) worker.take(work_tile_of<Whole>(params, map, n));
    }
  };
  if (threadIdx.x < kDecodeConsumerThreads) {
    each_work_tile(Decoder<Whole>(params, map));
  } else if (threadIdx.x / 32 == kDecodeConsumerThreads / 32) {
    each_work_tile(TileProducer<Whole>(params, map));
  }
}

// Where CTAs have few columns each, these are the rows of the products.
template <class C>
__device__ __forceinline__ auto outputs_by_slices(const DecodeParams& params, const SlicedMap<C>& map,
                                                  std::uint32_t rank) {
  if constexpr (C::kSlices == kMaxSlices) {
    return ColumnOutputs<C>(params, map, rank, TileColumns<C>(map));
  } else {
    return SlicedOutputs<C>(params, map, rank);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sliced_kernel(const __grid_constant__ DecodeParams params) {
  const SlicedMap<C> map;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers(params, map);
    store_number(map.any_failed(), 0);
  }
  cuda::pdl_launch_dependents();
  SlicedWork work = work_info_of<C>();
  if (params.late > 0 && !any_partial_split<C>(params)) {
    work.step -= params.late;
    if (work.first >= work.step) return;
  }
  __syncthreads();
  arrive_in_cluster<C, false>();  // whoever writes to other CTAs waits until all have come so far
  decode_sliced<C>(
      params, map, rank, work, [&] { return TileKeys<C>(map); },
      [&] { return outputs_by_slices<C>(params, map, rank); }, [&](auto) { return TileBoxes<C>(params); },
      [&] { store_number(map.any_failed(), 1); });
  await_prefixes(params);
  __syncthreads();
  if (load_number(map.any_failed()) == 0) return;
  // All CTAs of the cluster have come so far, as they see the same; what they have left of failed work_tiles is written
  // over.
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
  if (rank == 0) recompute_failed_tiles<C>(params, work.first, work.step);
}

}  // namespace ringattn::sm90
