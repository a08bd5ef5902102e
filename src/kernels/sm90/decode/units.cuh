// SPDX-License-Identifier: Apache-2.0
// How a step is cut into units. A unit is one group of key tiles of one sequence, for up to 64 query rows of one KV
// head. Lengths are known on the device alone, so every CTA counts the units of each sequence for itself; unit n is
// folded by CTA n modulo their number.
#pragma once

#include "kernels/merge.hpp"
#include "kernels/sm90/decode/decode_params.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/threads.cuh"

namespace ringattn::sm90 {

// Where the rows of a sequence stand, and the tiles that some of them folds.
struct DecodeSequence {
  int length;
  int position;     // of row 0
  int first, last;  // tiles [first, last)

  // Groups; one, of no tiles, where no row folds a tile: its rows are written all the same.
  __device__ int first_group() const { return first / kGroupTiles; }
  __device__ int groups() const { return first < last ? (last - 1) / kGroupTiles + 1 - first_group() : 1; }
};

template <class C>
__device__ __forceinline__ DecodeSequence sequence_of(const DecodeParams& p, int sequence) {
  const int length = __ldg(p.lengths + sequence);
  const TileRange tiles =
      Visibility(p.fold.mask, length).tiles(length - p.rows, p.rows, TileSizes{kQueryTile, C::kKeyTile});
  const bool none = tiles.empty();
  return {length, length - p.rows, none ? 0 : static_cast<int>(tiles.begin), none ? 0 : static_cast<int>(tiles.end)};
}

struct DecodeUnit {
  DecodeSequence of;
  int sequence, kv_head, block;
  int number;        // of all units
  int begin, end;    // tiles that it folds: a group's, as far as rows fold them
  int first_number;  // of the unit of the same rows in the sequence's first group
  int stride;        // from there to the unit of the next group

  __device__ int group() const { return begin / kGroupTiles; }
};

// Fills the table of units in shared memory, whose map is given: how many come before each sequence. All threads of the
// CTA; they meet at its end.
template <class C, class Map>
__device__ __forceinline__ void count_units(const DecodeParams& p, const Map& map) {
  const int each = p.fold.kv_heads * p.blocks;
  for (int s = thread_of_cta(); s < p.sequences; s += static_cast<int>(blockDim.x)) {
    store_number(map.units_before(s + 1), sequence_of<C>(p, s).groups() * each);
  }
  __syncthreads();
  if (thread_of_cta() < 32) {
    int before = 0;
    for (int first = 0; first < p.sequences; first += 32) {
      const int s = first + thread_of_cta();
      int sum = s < p.sequences ? load_number(map.units_before(s + 1)) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffU, sum, step);
        if (thread_of_cta() >= step) sum += other;
      }
      if (s < p.sequences) store_number(map.units_before(s + 1), before + sum);
      before += __shfl_sync(0xffffffffU, sum, 31);
    }
    if (thread_of_cta() == 0) store_number(map.units_before(0), 0);
  }
  __syncthreads();
}

template <class Map>
__device__ __forceinline__ int unit_count(const DecodeParams& p, const Map& map) {
  return load_number(map.units_before(p.sequences));
}

template <class C, class Map>
__device__ __forceinline__ DecodeUnit unit_of(const DecodeParams& p, const Map& map, int number) {
  int sequence = 0;
  for (int count = p.sequences; count > 1;) {
    const int half = count / 2;
    const bool behind = load_number(map.units_before(sequence + half)) <= number;
    sequence += behind ? half : 0;
    count = behind ? count - half : half;
  }
  DecodeUnit unit;
  unit.of = sequence_of<C>(p, sequence);
  unit.sequence = sequence;
  unit.number = number;
  unit.stride = p.fold.kv_heads * p.blocks;
  const int before = load_number(map.units_before(sequence));
  const int nth = (number - before) / unit.stride;
  const int rest = (number - before) - nth * unit.stride;
  unit.kv_head = rest / p.blocks;
  unit.block = rest - unit.kv_head * p.blocks;
  unit.first_number = before + rest;
  const int group = unit.of.first_group() + nth;
  const int begin = group * kGroupTiles;
  const int end = begin + kGroupTiles;
  unit.begin = begin > unit.of.first ? begin : unit.of.first;
  unit.end = end < unit.of.last ? end : unit.of.last;
  return unit;
}

}  // namespace ringattn::sm90
