// SPDX-License-Identifier: Apache-2.0
// How a step is cut into units. A unit is one group of key tiles of one sequence, for up to block_rows query rows of
// one KV head. Lengths are known on the device alone, so every CTA counts the units of each sequence for itself; unit n
// is folded by the n-th CTA, or cluster, modulo their number. Positions and tiles are numbers of 32 bits.
#pragma once

#include "kernels/cuda/device/overlap.cuh"
#include "kernels/decode_lists.hpp"
#include "kernels/merge.hpp"
#include "kernels/sm90/decode/decode_params.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/threads.cuh"

namespace ringattn::sm90 {

// A launch that folds what sequences have besides their shared prefixes runs beside the one of the prefixes, which is
// in front of it and has waited for all others (prefix.cuh). So it waits at its end: with it, both are done. Whoever
// reads a state that this one leaves waits for it before (finish.cuh).
__device__ __forceinline__ void await_kernels_before_step(const DecodeParams& p) {
  if (p.prefix_of == nullptr) cuda::await_kernels_before();
}
__device__ __forceinline__ void await_prefixes(const DecodeParams& p) {
  if (p.prefix_of != nullptr) cuda::await_kernels_before();
}

// How many key tiles a group has, and the group of a tile: a constant of the kernel, or what a launch says.
struct FixedGroups {
  static __device__ __forceinline__ int tiles(const DecodeParams&) { return kGroupTiles; }
  static __device__ __forceinline__ int of_tile(const DecodeParams&, int tile) { return tile / kGroupTiles; }
};
struct LaunchedGroups {
  static __device__ __forceinline__ int tiles(const DecodeParams& p) { return 1 << p.group_log; }
  static __device__ __forceinline__ int of_tile(const DecodeParams& p, int tile) { return tile >> p.group_log; }
};

using DecodeVisibility = BasicVisibility<std::int32_t>;

__device__ __forceinline__ DecodeVisibility visibility_of(const DecodeParams& p, int length) {
  return {p.left, p.right, length};
}

// Where the rows of a sequence stand, and the tiles that some of them folds. With lists, what is not listed is as if it
// were not there (kernels/decode_lists.hpp); where the rest lies, tile_in_sequence() says.
struct DecodeSequence {
  int length;
  int position;     // of row 0
  int first, last;  // tiles [first, last), without those of a prefix that others fold; none: both are 0
  int begin_group;  // of the cache's groups, the first that some row folds
  int groups;       // of the cache's, as many, and so many units
  int listed, gap;  // blocks in front of the rows' own, and how many tiles these lie further on
  bool resumes;     // the group of the first tile goes on from the states that a prefix's tiles there have left

  // Whether a unit finishes its rows: there is no other group.
  __device__ bool single() const { return groups == 1; }
};

// The prefix that the sequence shares, or −1.
__device__ __forceinline__ int prefix_of(const DecodeParams& p, int sequence) {
  if (p.prefix_of == nullptr) return -1;
  const int prefix = __ldcg(p.prefix_of + sequence);
  return prefix >= 0 && prefix < p.prefixes ? prefix : -1;
}

// How many tiles of a prefix may be folded once for all: whole ones, in pages that it fills.
template <class C>
__device__ __forceinline__ int prefix_tiles(const DecodeParams& p, int prefix) {
  const int keys = __ldcg(p.prefix_keys + prefix) >> p.page_log << p.page_log;
  return keys > 0 ? keys / C::kKeyTile : 0;
}

// Whether a prefix has tiles of an open group. Asked by all threads of a CTA.
template <class C>
__device__ __forceinline__ bool any_open_group(const DecodeParams& p) {
  bool open = false;
#pragma unroll 1
  for (int i = thread_of_cta(); i < p.prefixes; i += static_cast<int>(blockDim.x)) {
    open = open || prefix_tiles<C>(p, i) % kGroupTiles != 0;
  }
  return __syncthreads_or(open ? 1 : 0) != 0;
}

// How many of its prefix's tiles are folded for the sequence together with those of others: all of them; or those of
// whole groups, where a row doesn't see all keys of the others, or folds no tile behind them; or none. So those who
// pack rows need no look at single tiles. Prefixes are of kernels with FixedGroups.
template <class C>
__device__ __forceinline__ int shared_tiles(const DecodeParams& p, int tiles, int length, int position) {
  const DecodeVisibility visibility = visibility_of(p, length);
  const auto seen = visibility.common_keys(position, position + p.rows - 1);
  if (seen.begin != 0) return 0;
  const int whole = tiles / kGroupTiles * kGroupTiles;
  if (tiles > whole && tiles * C::kKeyTile <= seen.end &&
      tiles < visibility.tiles(position, TileSizes{kQueryTile, C::kKeyTile}).end) {
    return tiles;
  }
  return whole * C::kKeyTile <= seen.end ? whole : 0;
}

// A tile of the keys that a list leaves, among all of the sequence. `list`: of all sequences' lists.
__device__ __forceinline__ int tile_in_sequence(const DecodeParams& p, int list, int listed, int gap, int tile) {
  if (p.list_blocks == nullptr) return tile;
  const int place = p.by_list_tiles.quotient(tile);
  if (place >= listed) return tile + gap;
  return tile + (__ldcg(p.list_blocks + list * p.list_stride + place) - place) * p.list_tiles;
}

// By the `list`-th of all lists, and without lists of the `list`-th sequence.
template <class C>
__device__ __forceinline__ DecodeSequence sequence_of(const DecodeParams& p, int list) {
  using Groups = typename C::Groups;
  const int sequence = p.list_blocks == nullptr ? list : p.by_lists.quotient(list);
  DecodeSequence of;
  of.length = __ldcg(p.lengths + sequence);  // a kernel that is still running when this one starts may write it
  of.listed = 0;
  of.gap = 0;
  if (p.list_blocks != nullptr) {
    const std::int32_t* const blocks = p.list_blocks + list * p.list_stride;
    const KeysByList keys = keys_by_list(of.length, p.rows, p.list_tiles * C::kKeyTile, __ldcg(p.list_counts + list),
                                         [blocks](int i) { return __ldcg(blocks + i); });
    of.length = keys.keys;
    of.listed = keys.listed;
    of.gap = keys.gap() * p.list_tiles;
  }
  of.position = of.length - p.rows;
  const auto tiles = visibility_of(p, of.length).tiles(of.position, p.rows, TileSizes{kQueryTile, C::kKeyTile});
  const bool none = tiles.empty();
  of.first = none ? 0 : tiles.begin;
  of.last = none ? 0 : tiles.end;
  of.resumes = false;
  if (const int prefix = prefix_of(p, sequence); prefix >= 0) {
    const int shared = shared_tiles<C>(p, prefix_tiles<C>(p, prefix), of.length, of.position);
    if (shared > 0) of.first = shared;  // from 0
    of.resumes = shared % kGroupTiles != 0;
  }
  // Where no row folds a tile there is a unit of no tiles all the same, so that its rows are written.
  of.begin_group = Groups::of_tile(p, of.first);
  of.groups = none ? 1 : Groups::of_tile(p, of.last - 1) + 1 - of.begin_group;
  if (p.every_group > 1 || p.records != nullptr) {
    const int end_group = none ? of.begin_group : of.begin_group + of.groups;
    const auto of_share = [&p](int group) { return (group - p.first_group + p.every_group - 1) / p.every_group; };
    of.begin_group = of_share(of.begin_group);
    of.groups = of_share(end_group) - of.begin_group;
  }
  return of;
}

struct DecodeUnit {
  DecodeSequence of;
  int sequence, kv_head, block;
  int list;          // of all sequences' lists
  int number;        // of all units
  int cache_group;   // of the groups that the cache holds of the sequence
  int begin, end;    // tiles that it folds: a group's, as far as rows fold them
  int first_number;  // of the unit of the same rows in the sequence's first group
  int stride;        // from there to the unit of the next group
  int lag;           // keys that the cache doesn't hold before the unit's
  bool resumes;      // its rows go on from the states that their prefix has left
};

// Units of a group, of the rows that share a list.
__device__ __forceinline__ int unit_stride(const DecodeParams& p) { return p.list_kv_heads * p.blocks; }

// Fills the table of units in shared memory, whose map is given: how many come before each sequence, or each list.
// Returns how many there are. By one warp.
template <class C, class Map>
__device__ __forceinline__ int count_units(const DecodeParams& p, const Map& map) {
  const int lane = thread_of_cta() % 32;
  const int each = unit_stride(p);
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < p.sequences; first += 32) {
    const int s = first + lane;
    int sum = s < p.sequences ? sequence_of<C>(p, s).groups * each : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, sum, step);
      if (lane >= step) sum += other;
    }
    if (s < p.sequences) store_number(map.units_before(s + 1), before + sum);
    before += __shfl_sync(0xffffffffU, sum, 31);
  }
  if (lane == 0) store_number(map.units_before(0), 0);
  __syncwarp();
  return before;
}

template <class Map>
__device__ __forceinline__ int unit_count(const DecodeParams& p, const Map& map) {
  return load_number(map.units_before(p.sequences));
}

// Unit `number`, of a sequence, or a list, before which there are `before`.
template <class C>
__device__ __forceinline__ DecodeUnit unit_in(const DecodeParams& p, int list, int before, int number) {
  using Groups = typename C::Groups;
  DecodeUnit unit;
  unit.of = sequence_of<C>(p, list);
  unit.list = list;
  unit.sequence = p.list_blocks == nullptr ? list : p.by_lists.quotient(list);
  unit.number = number;
  unit.stride = unit_stride(p);
  const int nth = p.by_stride.quotient(number - before);
  const int rest = (number - before) - nth * unit.stride;
  unit.kv_head = p.by_blocks.quotient(rest);
  unit.block = rest - unit.kv_head * p.blocks;
  if (p.list_blocks != nullptr) {
    unit.kv_head += (list * p.list_kv_heads) - unit.sequence * p.fold.kv_heads;  // those of the lists before
  }
  unit.first_number = before + rest;
  unit.cache_group = unit.of.begin_group + nth;
  const int group = p.first_group + unit.cache_group * p.every_group;
  unit.lag = (group - unit.cache_group) * (Groups::tiles(p) * C::kKeyTile);
  const int begin = group * Groups::tiles(p);
  const int end = begin + Groups::tiles(p);
  unit.begin = begin > unit.of.first ? begin : unit.of.first;
  unit.end = end < unit.of.last ? end : unit.of.last;
  unit.resumes = unit.of.resumes && unit.begin == unit.of.first;
  return unit;
}

template <class C, class Map>
__device__ __forceinline__ DecodeUnit unit_of(const DecodeParams& p, const Map& map, int number) {
  int sequence = 0;
#pragma unroll 1
  for (int count = p.sequences; count > 1;) {
    const int half = count / 2;
    const bool behind = load_number(map.units_before(sequence + half)) <= number;
    sequence += behind ? half : 0;
    count = behind ? count - half : half;
  }
  return unit_in<C>(p, sequence, load_number(map.units_before(sequence)), number);
}

}  // namespace ringattn::sm90
