// SPDX-License-Identifier: Apache-2.0
// The query rows of a work tile: their coordinates, visible keys and tiles.
#pragma once

#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/decode/sm90/work_tiles.cuh"

namespace ringattn::sm90 {

// Farther than any key, in either direction.
inline constexpr int kNoKey = 1 << 30;

// How many rows a work tile has.
__device__ __forceinline__ int rows_of(const DecodeParams& p, const DecodeWorkTile& work_tile) {
  const int left = p.rows * p.ratio - work_tile.block * p.block_rows;
  return left < p.block_rows ? left : p.block_rows;
}

// Coordinate in q and out of row `tile_row` of a work tile.
struct DecodeCoord {
  int row, query_head;
  int of_sequence;  // query token of its sequence
};
__device__ __forceinline__ DecodeCoord coord_of(const DecodeParams& p, const DecodeWorkTile& work_tile, int tile_row) {
  const int number = work_tile.block * p.block_rows + tile_row;
  const int i = p.by_ratio.quotient(number);
  return {work_tile.sequence * p.rows + i, work_tile.kv_head * p.ratio + (number - i * p.ratio), i};
}

// The keys that a row sees, [low, high), and its tiles within the work tile, [begin, end). If it has none, both are the
// work tile's end.
struct RowRange {
  int low, high;
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowRange range_of(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                             const DecodeCoord& coord) {
  const DecodeVisibility visibility = visibility_of(p, work_tile.seq_info.length);
  const int position = work_tile.seq_info.position + coord.of_sequence;
  const auto keys = visibility.keys(position);
  const auto tiles = visibility.tiles(position, TileSizes{kQueryTile, C::kKeyTile});
  const bool none = tiles.empty() || tiles.begin >= work_tile.end || tiles.end <= work_tile.begin;
  return {keys.empty() ? kNoKey : keys.begin, keys.empty() ? 0 : keys.end,
          none                            ? work_tile.end
          : tiles.begin > work_tile.begin ? tiles.begin
                                          : work_tile.begin,
          none || tiles.end > work_tile.end ? work_tile.end : tiles.end};
}

// The KV splits, of those that the cache holds, to which a row attends: [begin, end).
struct RowKvSplits {
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowKvSplits splits_of(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                 const DecodeCoord& coord) {
  const auto tiles = visibility_of(p, work_tile.seq_info.length)
                         .tiles(work_tile.seq_info.position + coord.of_sequence, TileSizes{kQueryTile, C::kKeyTile});
  if (tiles.empty()) return {0, 0};
  return {C::KvSplits::of_tile(p, tiles.begin), C::KvSplits::of_tile(p, tiles.end - 1) + 1};
}

// The keys that all rows of a work tile see.
__device__ __forceinline__ BasicKeyRange<int> common_keys(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                          int rows) {
  const int last = coord_of(p, work_tile, rows - 1).of_sequence;
  const int first = coord_of(p, work_tile, 0).of_sequence;
  const auto keys = visibility_of(p, work_tile.seq_info.length)
                        .common_keys(work_tile.seq_info.position + first, work_tile.seq_info.position + last);
  return keys.empty() ? BasicKeyRange<int>{kNoKey, 0} : keys;
}

// The two rows of which a thread of the consumer warpgroup has a share: `half` 0 and 1.
struct ThreadRows {
  DecodeCoord coord[2];
  bool present[2];  // else there is no such row, and the fields repeat the last row
  int low[2], high[2];
  int begin[2], end[2];
};

// `first`: the thread's tile row of half 0. The other one is 8 rows below it.
template <class C>
__device__ __forceinline__ ThreadRows thread_rows_of(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                     int first) {
  const int rows = rows_of(p, work_tile);
  ThreadRows thread_rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = first + 8 * half;
    thread_rows.present[half] = tile_row < rows;
    thread_rows.coord[half] = coord_of(p, work_tile, tile_row < rows ? tile_row : rows - 1);
    const RowRange row_range = range_of<C>(p, work_tile, thread_rows.coord[half]);
    thread_rows.low[half] = row_range.low;
    thread_rows.high[half] = row_range.high;
    thread_rows.begin[half] = row_range.begin;
    thread_rows.end[half] = row_range.end;
  }
  return thread_rows;
}

// For recompute_tile.cuh: the columns of a tile that a row sees.
template <class C>
__device__ __forceinline__ Columns visible_columns(const ThreadRows& thread_rows, int half, int number) {
  const int key = number * C::kKeyTile + thread_of_cta() % 4 * 2;
  return {thread_rows.low[half] - key, thread_rows.high[half] - key};
}

// Plain tiles [first, last) of a work tile: each row sees every key, and no row begins or ends there.
template <class C>
__device__ __forceinline__ BasicTileRange<int> plain_tiles(const DecodeParams& p, const DecodeWorkTile& work_tile) {
  const int rows = rows_of(p, work_tile);
  const auto common = common_keys(p, work_tile, rows);
  if (common.empty()) return {work_tile.end, work_tile.end};
  const int begin = (common.begin + C::kKeyTile - 1) / C::kKeyTile;
  const int last = range_of<C>(p, work_tile, coord_of(p, work_tile, rows - 1)).begin;
  return {begin > last ? begin : last + 1, common.end / C::kKeyTile};
}

// Transposes a 4 × 4 matrix of words over a quad of lanes: lane i gets word i of each of the four. So a row's blocks of
// 8 columns, of which each lane has two columns, become one block for each lane, and vice versa.
__device__ __forceinline__ uint4 transpose_in_quad(uint4 x, int lane) {
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

// Eight elements of a row of q. `aligned`: to 16 bytes. The load bypasses L1, which may hold old data if this launch
// starts before the previous one has ended (PDL, pdl.cuh).
__device__ __forceinline__ uint4 load_elements(const std::uint16_t* from, bool aligned) {
  if (aligned) return __ldcg(reinterpret_cast<const uint4*>(from));
  const auto pair = [from](int w) {
    return __ldcg(from + 2 * w) | static_cast<std::uint32_t>(__ldcg(from + 2 * w + 1)) << 16;
  };
  return {pair(0), pair(1), pair(2), pair(3)};
}

}  // namespace ringattn::sm90
