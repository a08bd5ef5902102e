// SPDX-License-Identifier: Apache-2.0
// The sliced kernel (sliced.cuh) over a compressed cache: the warps that multiply make elements of codes for
// themselves. A unit that fails is left to a launch behind (compressed_whole.cuh).
#pragma once

#include "kernels/sm90/decode/compressed_fetch.cuh"
#include "kernels/sm90/decode/packed_keys.cuh"
#include "kernels/sm90/decode/packed_values.cuh"
#include "kernels/sm90/decode/sliced.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) compressed_kernel(const __grid_constant__ CompressedParams params) {
  const CompressedMap<C> map;
  const DecodeParams& step_params = params.step;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) init_sliced_barriers<C>(map);
  if (threadIdx.x == 32) init_packed_barriers<C>(params, map);
  let_next_begin();
  __syncthreads();
  arrive_in_cluster<C, false>();  // whoever writes to other CTAs waits until all have come so far
  await_kernels_before();
  fold_sliced<C>(
      step_params, map, rank, work_of<C>(), [&] { return PackedKeys<C>(params, map); },
      [&] { return SlicedOutputs<C, PackedValues<C>>(step_params, map, rank, PackedValues<C>(params, map, rank)); },
      [&](auto values) { return PackedBoxes<C, values>(params, map, rank); }, [] {});
  // A CTA stays until nobody writes to its shared memory any more.
  __syncthreads();
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
}

}  // namespace ringattn::sm90
