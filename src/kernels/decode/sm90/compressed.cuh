// SPDX-License-Identifier: Apache-2.0
// The sliced kernel (sliced.cuh) over a quantized cache: the warps that issue mma dequantize in registers. Failed work
// tiles are recomputed tile by tile at the end (compressed_whole.cuh).
#pragma once

#include "kernels/decode/sm90/compressed_fetch.cuh"
#include "kernels/decode/sm90/compressed_whole.cuh"
#include "kernels/decode/sm90/quantized_keys.cuh"
#include "kernels/decode/sm90/quantized_values.cuh"
#include "kernels/decode/sm90/sliced.cuh"

namespace ringattn::sm90 {

// As recompute_failed(), over a quantized cache.
template <class C>
__device__ __noinline__ void recompute_failed(const CompressedParams& p, int first, int step) {
  using Whole = typename C::Whole;
  static_assert(C::kThreads >= kWholeThreads);
  const DecodeMap<Whole> map;
  lay_out_whole(p.step, map, [] {
    const CompressedMap<C> before;
    for (std::uint32_t i = 0; i < ColumnSliceMap<C>::kBarriers; ++i) barrier_invalidate(before.k_full(i));
    for (std::uint32_t i = 0; i < CompressedMap<C>::kQuantizedBarriers; ++i) {
      barrier_invalidate(before.quantized_full(false, i));
    }
  });
  decode_whole_tiles(p, map, first, step, [&p](int n) { return __ldcg(p.step.failed + n) != 0; });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) compressed_kernel(const __grid_constant__ CompressedParams params) {
  const CompressedMap<C> map;
  const DecodeParams& step_params = params.step;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers<C>(step_params, map);
    store_number(map.any_failed(), 0);
  }
  if (threadIdx.x == 32) init_quantized_barriers<C>(params, map);
  cuda::pdl_launch_dependents();
  __syncthreads();
  arrive_in_cluster<C, false>();  // warps that write to other CTAs wait for this arrival of all
  cuda::pdl_wait();
  const ClusterWorkTiles work = cluster_work_tiles<C>();
  decode_sliced<C>(
      step_params, map, rank, work, [&] { return QuantizedKeys<C>(params, map); },
      [&] {
        return ColumnOutputs<C, QuantizedColumns<C>>(step_params, map, rank, QuantizedColumns<C>(params, map, rank));
      },
      [&](auto values) { return QuantizedBoxes<C, values>(params, map, rank); },
      [&] { store_number(map.any_failed(), 1); });
  // A CTA stays until no other CTA writes to its shared memory.
  __syncthreads();
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
  if (rank == 0 && load_number(map.any_failed()) != 0) recompute_failed<C>(params, work.first, work.step);
}

}  // namespace ringattn::sm90
