// SPDX-License-Identifier: Apache-2.0
// The rows of a unit as a thread of the folding warpgroup has them: a share of two, `half` 0 and 1.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/fold/tile_step.cuh"

namespace ringattn::sm90 {

// Farther than any key, in either direction.
inline constexpr int kNoKey = 1 << 30;

struct DecodeSlots {
  int row[2];  // in q and out
  int query_head[2];
  bool present[2];       // else the slot is empty, and counts as the last row again
  int low[2], high[2];   // the row sees keys [low, high)
  int begin[2], end[2];  // and folds tiles [begin, end), of the unit's; where it folds none, both are the unit's end
};

// Where a row stands, and the tiles that it folds of its whole sequence.
struct DecodeRow {
  int row, query_head;
  std::int64_t position;
  TileRange tiles;
};

// How many rows a unit has.
__device__ __forceinline__ int rows_of(const DecodeParams& p, const DecodeUnit& unit) {
  const int left = p.rows * p.ratio - unit.block * p.block_rows;
  return left < p.block_rows ? left : p.block_rows;
}

template <class C>
__device__ __forceinline__ DecodeRow row_of(const DecodeParams& p, const DecodeUnit& unit, int slot) {
  const int number = unit.block * p.block_rows + slot;
  const int i = number / p.ratio;
  DecodeRow row;
  row.row = unit.sequence * p.rows + i;
  row.query_head = unit.kv_head * p.ratio + (number - i * p.ratio);
  row.position = unit.of.position + i;
  row.tiles = Visibility(p.fold.mask, unit.of.length).tiles(row.position, TileSizes{kQueryTile, C::kKeyTile});
  return row;
}

// `first`: the thread's slot of half 0; the other one is 8 behind.
template <class C>
__device__ __forceinline__ DecodeSlots slots_of(const DecodeParams& p, const DecodeUnit& unit, int first) {
  const int rows = rows_of(p, unit);
  const Visibility visibility(p.fold.mask, unit.of.length);
  DecodeSlots slots;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = first + 8 * half;
    slots.present[half] = slot < rows;
    const DecodeRow row = row_of<C>(p, unit, slot < rows ? slot : rows - 1);
    slots.row[half] = row.row;
    slots.query_head[half] = row.query_head;
    const KeyRange keys = visibility.keys(row.position);
    slots.low[half] = keys.empty() ? kNoKey : static_cast<int>(keys.begin);
    slots.high[half] = keys.empty() ? 0 : static_cast<int>(keys.end);
    const bool none = row.tiles.empty() || row.tiles.begin >= unit.end || row.tiles.end <= unit.begin;
    slots.begin[half] = none ? unit.end : row.tiles.begin > unit.begin ? static_cast<int>(row.tiles.begin) : unit.begin;
    slots.end[half] = none || row.tiles.end > unit.end ? unit.end : static_cast<int>(row.tiles.end);
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
__device__ __forceinline__ TileRange plain_tiles(const DecodeParams& p, const DecodeUnit& unit) {
  const int rows = rows_of(p, unit);
  const DecodeRow first = row_of<C>(p, unit, 0);
  const DecodeRow last = row_of<C>(p, unit, rows - 1);
  const KeyRange common = Visibility(p.fold.mask, unit.of.length).common_keys(first.position, last.position);
  if (common.empty()) return {unit.end, unit.end};
  const std::int64_t begin = quotient(common.begin + C::kKeyTile - 1, C::kKeyTile);
  return {begin > last.tiles.begin ? begin : last.tiles.begin + 1, quotient(common.end, C::kKeyTile)};
}

}  // namespace ringattn::sm90
