// SPDX-License-Identifier: Apache-2.0
// Decoding on Hopper, with the bits of the fold. A CTA takes units, each a group of key tiles for the rows of one KV
// head (units.cuh); one warp fetches (fetch.cuh), a warpgroup folds (decoder.cuh), and the last unit of a sequence's
// rows merges what all have left (finish.cuh).
#pragma once

#include "kernels/sm90/decode/decoder.cuh"
#include "kernels/sm90/decode/fetch.cuh"

namespace ringattn::sm90 {

template <class C>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams params) {
  const DecodeMap<C> map;
  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < C::kStages; ++i) {
      barrier_init(map.k_full(i), 1);
      barrier_init(map.v_full(i), 1);
      barrier_init(map.k_empty(i), kDecodeFoldThreads / 32);
      barrier_init(map.v_empty(i), kDecodeFoldThreads / 32);
    }
    barrier_init_fence();
  }
  count_units<C>(params, map);
  if (threadIdx.x < kDecodeFoldThreads) {
    Decoder<C>(params, map).run();
  } else {
    Fetcher<C>(params, map).run();
  }
}

}  // namespace ringattn::sm90
