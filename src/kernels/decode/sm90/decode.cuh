// SPDX-License-Identifier: Apache-2.0
// The Hopper decode kernel, bitwise identical to prefill. A CTA takes work tiles, each one KV split of a sequence for a
// row block of one KV head (work_tiles.cuh). One producer warp loads (fetch.cuh), a consumer warpgroup computes
// (decoder.cuh), and the last work tile of a row block merges all partials (finish.cuh).
#pragma once

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/decode/sm90/decoder.cuh"
#include "kernels/decode/sm90/fetch.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams params) {
  const DecodeMap<C> map;
  if (threadIdx.x == 0) init_decode_barriers(map);
  cuda::pdl_launch_dependents();
  pdl_wait_before_step(params);
  if (threadIdx.x >= kDecodeConsumerThreads) count_work_tiles<C>(params, map);
  __syncthreads();
  const int work_tiles = work_tile_count(params, map);
  int ctas = static_cast<int>(gridDim.x);
  if (params.late > 0 && !any_partial_split<C>(params)) ctas -= params.late;
  const auto each_work_tile = [&](auto&& worker) {
    if (static_cast<int>(blockIdx.x) >= ctas) return;
    for (int n = static_cast<int>(blockIdx.x); n < work_tiles; n += ctas) {
      worker.process(work_tile_of<C>(params, map, n));
    }
  };
  if (threadIdx.x < kDecodeConsumerThreads) {
    each_work_tile(Decoder<C>(params, map));
  } else {
    each_work_tile(TileProducer<C>(params, map));
  }
  await_prefixes(params);
}

}  // namespace ringattn::sm90
