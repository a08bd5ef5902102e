// SPDX-License-Identifier: Apache-2.0
// The sliced kernel (sliced.cuh) over a compressed cache: the warps that multiply make elements of codes for
// themselves. A unit that fails is left to a launch behind (compressed_whole.cuh).
#pragma once

#include "kernels/sm90/decode/compressed_fetch.cuh"
#include "kernels/sm90/decode/packed_keys.cuh"
#include "kernels/sm90/decode/packed_values.cuh"
#include "kernels/sm90/decode/sliced.cuh"
#include "kernels/sm90/ptx/threads.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) compressed_kernel(const __grid_constant__ CompressedParams params) {
  const CompressedMap<C> map;
  const DecodeParams& step_params = params.step;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers<C>(map);
  }
  if (threadIdx.x < 32) init_packed_barriers<C>(params, map);
  let_next_begin();
  __syncthreads();
  arrive_in_cluster<C, false>();  // whoever writes to other CTAs waits until all have come so far
  await_kernels_before();
  const int first = static_cast<int>(blockIdx.x) / C::kSlices;
  const int step = static_cast<int>(gridDim.x) / C::kSlices;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto each_note = [&](auto take) { for_each_note<C>(map, first, step, take); };
  if (warp < kScoreWarps) {
    Scorer<C, PackedKeys<C>> scorer(step_params, map, rank, PackedKeys<C>(params, map));
    each_note([&](const UnitNote& note, int) { scorer.take(note); });
  } else if (warp < kScoreWarps + C::kOutWarps) {
    SlicedOutputs<C, PackedValues<C>> outputs(step_params, map, rank, PackedValues<C>(params, map, rank));
    each_note([&](const UnitNote& note, int number) {
      const bool failed = outputs.take(note);
      if (outputs.speaks() && rank == 0) __stcg(step_params.failed + number, failed ? 1 : 0);
    });
  } else if (warp == kScoreWarps + C::kOutWarps) {
    SumMaker<C> maker(map, rank);
    each_note([&](const UnitNote& note, int) { maker.take(note); });
  } else if (warp == kScoreWarps + C::kOutWarps + 1) {
    SumAdder<C> adder(map);
    each_note([&](const UnitNote& note, int) { adder.take(note); });
  } else if (warp == kScoreWarps + C::kOutWarps + 2) {
    ValueFetcher<C, PackedBoxes<C>> fetcher(map, rank, PackedBoxes<C>(params, map, rank));
    each_note([&](const UnitNote& note, int) { fetcher.take(note); });
  } else {
    KeyFetcher<C, PackedBoxes<C>> fetcher(step_params, map, rank, PackedBoxes<C>(params, map, rank));
    fetcher.run(first, step);
    wait_for_cluster<C>();
  }
  // A CTA stays until nobody writes to its shared memory any more.
  __syncthreads();
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
}

}  // namespace ringattn::sm90
