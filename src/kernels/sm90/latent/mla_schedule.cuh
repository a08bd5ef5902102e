// SPDX-License-Identifier: Apache-2.0
// Which work_tiles a CTA by itself folds, one behind the other. Units are dealt to CTAs one by one, and a launch behind
// merges them. But where it takes no more turns, a CTA has all groups of its rows, in ascending order: queries are
// loaded once, what the splits before come to stays with the CTA (mla_epilogue.cuh), and it finishes the rows; rows
// that have no split are left to the launch behind. Lengths are known on the device alone, so that is where this is
// chosen, by all CTAs alike. Bits are the same.
#pragma once

#include "kernels/sm90/decode/work_tiles.cuh"
#include "kernels/sm90/latent/mla_map.cuh"

namespace ringattn::sm90 {

// Fills the tables of work_tiles in shared memory. By one warp.
template <class C>
__device__ __forceinline__ void plan_work_tiles(const DecodeParams& p, const MlaMap& map) {
  const int work_tiles = count_work_tiles<C>(p, map);
  if (p.whole == nullptr) {
    if (thread_of_cta() % 32 == 0) store_number(map.whole(), 0);
    return;
  }
  int row_max = 0;  // work_tiles of a sequence
#pragma unroll 1
  for (int s = thread_of_cta() % 32; s < p.sequences; s += 32) {
    const int own = load_number(map.work_tiles_before(s + 1)) - load_number(map.work_tiles_before(s));
    row_max = own > row_max ? own : row_max;
  }
  const int each = work_tile_stride(p);
  const int splits = static_cast<int>(__reduce_max_sync(0xffffffffU, static_cast<unsigned>(row_max))) / each;
  const int ctas = static_cast<int>(gridDim.x);
  const auto turns = [ctas](int count) { return (count + ctas - 1) / ctas; };
  const int whole = turns(p.sequences * each) * splits <= turns(work_tiles) ? 1 : 0;
  if (thread_of_cta() % 32 != 0) return;
  store_number(map.whole(), whole);
  if (blockIdx.x == 0) *p.whole = whole;
}

// Calls take(work_tile) for each work_tile of this CTA. Units of two blocks of rows, and so rows, rescale_to each
// other.
template <class C, class Take>
__device__ __forceinline__ void for_each_work_tile(const DecodeParams& p, const MlaMap& map, Take take) {
  const bool whole = load_number(map.whole()) != 0;
  const int each = work_tile_stride(p);
  const int count = whole ? p.sequences * each : work_tile_count(p, map);
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < count; n += static_cast<int>(gridDim.x)) {
    int number = n, end = n + 1;
    if (whole) {
      const int sequence = p.by_stride.quotient(n);
      number = load_number(map.work_tiles_before(sequence)) + n - sequence * each;
      end = load_number(map.work_tiles_before(sequence + 1));  // not behind `number` where rows fold nothing
    }
#pragma unroll 1
    for (; number < end; number += each) take(work_tile_of<C>(p, map, number));
  }
}

}  // namespace ringattn::sm90
