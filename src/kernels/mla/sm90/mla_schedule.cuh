// SPDX-License-Identifier: Apache-2.0
// Assigns work tiles to the CTAs of mla_kernel. By default CTA n takes work tiles n, n + gridDim.x, …, and a second
// launch merges the KV splits. If it takes no more waves, a CTA processes all KV splits of its rows in ascending order
// instead: it loads the queries once, merges each split itself (mla_epilogue.cuh) and finishes the rows. Rows without a
// split are left to the second launch. Lengths are known only on the device, so all CTAs make the same choice there.
// The bits are the same either way.
#pragma once

#include "kernels/decode/sm90/work_tiles.cuh"
#include "kernels/mla/sm90/mla_map.cuh"

namespace ringattn::sm90 {

// Fills the table of work tiles in shared memory. By one warp.
template <class C>
__device__ __forceinline__ void plan_work_tiles(const DecodeParams& p, const MlaMap& map) {
  const int work_tiles = count_work_tiles<C>(p, map);
  if (p.whole == nullptr) {
    if (thread_of_cta() % 32 == 0) store_number(map.all_splits(), 0);
    return;
  }
  int max_work_tiles = 0;  // work tiles of a sequence
#pragma unroll 1
  for (int s = thread_of_cta() % 32; s < p.sequences; s += 32) {
    const int own = load_number(map.work_tiles_before(s + 1)) - load_number(map.work_tiles_before(s));
    max_work_tiles = own > max_work_tiles ? own : max_work_tiles;
  }
  const int stride = work_tile_stride(p);
  const int splits = static_cast<int>(__reduce_max_sync(0xffffffffU, static_cast<unsigned>(max_work_tiles))) / stride;
  const int ctas = static_cast<int>(gridDim.x);
  const auto waves = [ctas](int count) { return (count + ctas - 1) / ctas; };
  const int all_splits = waves(p.sequences * stride) * splits <= waves(work_tiles) ? 1 : 0;
  if (thread_of_cta() % 32 != 0) return;
  store_number(map.all_splits(), all_splits);
  if (blockIdx.x == 0) *p.whole = all_splits;
}

// Calls process(work_tile) for each work tile of this CTA. Work tiles of two row blocks of the same split have
// consecutive numbers.
template <class C, class Process>
__device__ __forceinline__ void for_each_work_tile(const DecodeParams& p, const MlaMap& map, Process process) {
  const bool all_splits = load_number(map.all_splits()) != 0;
  const int stride = work_tile_stride(p);
  const int count = all_splits ? p.sequences * stride : work_tile_count(p, map);
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < count; n += static_cast<int>(gridDim.x)) {
    int number = n, end = n + 1;
    if (all_splits) {
      const int sequence = p.by_stride.quotient(n);
      number = load_number(map.work_tiles_before(sequence)) + n - sequence * stride;
      end = load_number(map.work_tiles_before(sequence + 1));  // at most `number` if the rows attend to no key
    }
#pragma unroll 1
    for (; number < end; number += stride) process(work_tile_of<C>(p, map, number));
  }
}

}  // namespace ringattn::sm90
