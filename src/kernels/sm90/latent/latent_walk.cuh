// SPDX-License-Identifier: Apache-2.0
// Which units a CTA by itself folds, one behind the other. Units are dealt to CTAs one by one, and a launch behind
// merges them. But where it takes no more turns, a CTA has all groups of its rows, in ascending order: queries are
// loaded once, what the groups before come to stays with the CTA (latent_leave.cuh), and it finishes the rows; rows
// that have no group are left to the launch behind. Lengths are known on the device alone, so that is where this is
// chosen, by all CTAs alike. Bits are the same.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/latent/latent_map.cuh"

namespace ringattn::sm90 {

// Fills the tables of units in shared memory. By one warp.
template <class C>
__device__ __forceinline__ void plan_units(const DecodeParams& p, const LatentMap& map) {
  const int units = count_units<C>(p, map);
  if (p.whole == nullptr) {
    if (thread_of_cta() % 32 == 0) store_number(map.whole(), 0);
    return;
  }
  int most = 0;  // units of a sequence
#pragma unroll 1
  for (int s = thread_of_cta() % 32; s < p.sequences; s += 32) {
    const int own = load_number(map.units_before(s + 1)) - load_number(map.units_before(s));
    most = own > most ? own : most;
  }
  const int each = unit_stride(p);
  const int groups = static_cast<int>(__reduce_max_sync(0xffffffffU, static_cast<unsigned>(most))) / each;
  const int ctas = static_cast<int>(gridDim.x);
  const auto turns = [ctas](int count) { return (count + ctas - 1) / ctas; };
  const int whole = turns(p.sequences * each) * groups <= turns(units) ? 1 : 0;
  if (thread_of_cta() % 32 != 0) return;
  store_number(map.whole(), whole);
  if (blockIdx.x == 0) *p.whole = whole;
}

// Calls take(unit) for each unit of this CTA. Units of two blocks of rows, and so rows, follow each other.
template <class C, class Take>
__device__ __forceinline__ void for_each_unit(const DecodeParams& p, const LatentMap& map, Take take) {
  const bool whole = load_number(map.whole()) != 0;
  const int each = unit_stride(p);
  const int count = whole ? p.sequences * each : unit_count(p, map);
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < count; n += static_cast<int>(gridDim.x)) {
    int number = n, end = n + 1;
    if (whole) {
      const int sequence = p.by_stride.quotient(n);
      number = load_number(map.units_before(sequence)) + n - sequence * each;
      end = load_number(map.units_before(sequence + 1));  // not behind `number` where rows fold nothing
    }
#pragma unroll 1
    for (; number < end; number += each) take(unit_of<C>(p, map, number));
  }
}

}  // namespace ringattn::sm90
