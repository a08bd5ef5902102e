// SPDX-License-Identifier: Apache-2.0
// The query rows of a unit: where they stand, which keys they see and which tiles they fold.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/fold/tile_step.cuh"

namespace ringattn::sm90 {

// Farther than any key, in either direction.
inline constexpr int kNoKey = 1 << 30;

// How many rows a unit has.
__device__ __forceinline__ int rows_of(const DecodeParams& p, const DecodeUnit& unit) {
  const int left = p.rows * p.ratio - unit.block * p.block_rows;
  return left < p.block_rows ? left : p.block_rows;
}

// Where slot `slot` of a unit lies in q and out.
struct DecodePlace {
  int row, query_head;
  int of_sequence;  // which row of its sequence
};
__device__ __forceinline__ DecodePlace place_of(const DecodeParams& p, const DecodeUnit& unit, int slot) {
  const int number = unit.block * p.block_rows + slot;
  const int i = p.by_ratio.quotient(number);
  return {unit.sequence * p.rows + i, unit.kv_head * p.ratio + (number - i * p.ratio), i};
}

// The keys that a row sees, [low, high), and the tiles that it folds of the unit's, [begin, end). Where it folds none,
// both are the unit's end.
struct RowReach {
  int low, high;
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowReach reach_of(const DecodeParams& p, const DecodeUnit& unit, const DecodePlace& place) {
  const DecodeVisibility visibility = visibility_of(p, unit.of.length);
  const int position = unit.of.position + place.of_sequence;
  const auto keys = visibility.keys(position);
  const auto tiles = visibility.tiles(position, TileSizes{kQueryTile, C::kKeyTile});
  const bool none = tiles.empty() || tiles.begin >= unit.end || tiles.end <= unit.begin;
  return {keys.empty() ? kNoKey : keys.begin, keys.empty() ? 0 : keys.end,
          none                       ? unit.end
          : tiles.begin > unit.begin ? tiles.begin
                                     : unit.begin,
          none || tiles.end > unit.end ? unit.end : tiles.end};
}

// The groups that a row folds of those that the cache holds, [begin, end).
struct RowGroups {
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowGroups groups_of(const DecodeParams& p, const DecodeUnit& unit,
                                               const DecodePlace& place) {
  const auto tiles =
      visibility_of(p, unit.of.length).tiles(unit.of.position + place.of_sequence, TileSizes{kQueryTile, C::kKeyTile});
  if (tiles.empty()) return {0, 0};
  return {C::Groups::of_tile(p, tiles.begin), C::Groups::of_tile(p, tiles.end - 1) + 1};
}

// The keys that all of a unit's rows see.
__device__ __forceinline__ BasicKeyRange<int> common_keys(const DecodeParams& p, const DecodeUnit& unit, int rows) {
  const int last = place_of(p, unit, rows - 1).of_sequence;
  const int first = place_of(p, unit, 0).of_sequence;
  const auto keys = visibility_of(p, unit.of.length).common_keys(unit.of.position + first, unit.of.position + last);
  return keys.empty() ? BasicKeyRange<int>{kNoKey, 0} : keys;
}

// A thread's share of rows of the folding warpgroup: two, `half` 0 and 1.
struct DecodeSlots {
  DecodePlace place[2];
  bool present[2];  // else the slot is empty, and counts as the last row again
  int low[2], high[2];
  int begin[2], end[2];
};

// `first`: the thread's slot of half 0; the other one is 8 behind.
template <class C>
__device__ __forceinline__ DecodeSlots slots_of(const DecodeParams& p, const DecodeUnit& unit, int first) {
  const int rows = rows_of(p, unit);
  DecodeSlots slots;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = first + 8 * half;
    slots.present[half] = slot < rows;
    slots.place[half] = place_of(p, unit, slot < rows ? slot : rows - 1);
    const RowReach reach = reach_of<C>(p, unit, slots.place[half]);
    slots.low[half] = reach.low;
    slots.high[half] = reach.high;
    slots.begin[half] = reach.begin;
    slots.end[half] = reach.end;
  }
  return slots;
}

// What the tile step, done again (redo.cuh), asks: the columns of a tile that a row sees.
template <class C>
__device__ __forceinline__ Columns visible_columns(const DecodeSlots& slots, int half, int number) {
  const int key = number * C::kKeyTile + thread_of_cta() % 4 * 2;
  return {slots.low[half] - key, slots.high[half] - key};
}

// Tiles [first, last) of a unit in which each of its rows sees every key, and which no row begins or ends with.
template <class C>
__device__ __forceinline__ BasicTileRange<int> plain_tiles(const DecodeParams& p, const DecodeUnit& unit) {
  const int rows = rows_of(p, unit);
  const auto common = common_keys(p, unit, rows);
  if (common.empty()) return {unit.end, unit.end};
  const int begin = (common.begin + C::kKeyTile - 1) / C::kKeyTile;
  const int last = reach_of<C>(p, unit, place_of(p, unit, rows - 1)).begin;
  return {begin > last ? begin : last + 1, common.end / C::kKeyTile};
}

// Four lanes that follow each other have four words each. Afterwards lane i of them has the i-th words of all four. So
// a row's blocks of 8 columns, of which each lane has two columns, become one block a lane, and the other way round.
__device__ __forceinline__ uint4 turn_in_quad(uint4 x, int lane) {
  const auto swap = [](std::uint32_t& low, std::uint32_t& high, bool odd, int with) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffU, odd ? low : high, with);
    (odd ? low : high) = got;
  };
  swap(x.x, x.y, lane % 2 != 0, 1);
  swap(x.z, x.w, lane % 2 != 0, 1);
  swap(x.x, x.z, lane / 2 != 0, 2);
  swap(x.y, x.w, lane / 2 != 0, 2);
  return x;
}

// Eight elements of a row of q; `aligned`: to 16 bytes. Not from the multiprocessor's own cache: where a launch begins
// before the one in front of it has ended (overlap.cuh), what lies there might be old.
__device__ __forceinline__ uint4 load_elements(const std::uint16_t* from, bool aligned) {
  if (aligned) return __ldcg(reinterpret_cast<const uint4*>(from));
  const auto pair = [from](int w) {
    return __ldcg(from + 2 * w) | static_cast<std::uint32_t>(__ldcg(from + 2 * w + 1)) << 16;
  };
  return {pair(0), pair(1), pair(2), pair(3)};
}

}  // namespace ringattn::sm90
