// SPDX-License-Identifier: Apache-2.0
// Device code that the decode kernels share. Work tiles: which rows and KV splits a CTA computes, how it finds them on
// the device, and the rows of a work tile. The epilogue: a work tile stores its partials, and the last one of a row
// block merges all of them, in ascending order, by the same merge step as prefill (kernels/attention/merge.hpp).
#pragma once

#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/attention/merge.hpp"
#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/decode/decode_block_mask.hpp"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

// How a step is cut into work tiles: one KV split of one sequence, for up to RowBlocks::rows query rows of one KV head.
// Lengths are known only on the device, so every CTA counts the work tiles of all sequences. Work tile n belongs to CTA
// (or cluster) n modulo their number. Positions and tiles are 32-bit.

// Which parts of a step a kernel's parameters have.
template <class Params>
concept HasPrefixes = requires(const Params& p) {
  p.prefixes;
};
template <class Params>
concept HasBlockMask = requires(const Params& p) {
  p.mask;
};

// The launch for all other keys of the sequences runs concurrently with the prefix launch before it, which has waited
// for all earlier launches (prefix.cuh). So it waits for the prefix launch at its end: when it is complete, both are. A
// reader of a prefix state waits before reading (await_states()).
template <class Params>
__device__ __forceinline__ void pdl_wait_before_step(const Params& p) {
  if constexpr (HasPrefixes<Params>) {
    if (p.prefixes.of_sequence != nullptr) return;
  }
  cuda::pdl_wait();
}
template <class Params>
__device__ __forceinline__ void await_prefixes(const Params& p) {
  if (p.prefixes.of_sequence != nullptr) cuda::pdl_wait();
}

// Tiles of a KV split, and the split of a tile.
struct FixedKvSplits {
  static __device__ __forceinline__ int tiles(const WorkTileParams&) { return kTilesPerKvSplit; }
  static __device__ __forceinline__ int of_tile(const WorkTileParams&, int tile) { return tile / kTilesPerKvSplit; }
};

using DecodeVisibility = BasicVisibility<std::int32_t>;

__device__ __forceinline__ DecodeVisibility visibility_of(const DecodeRows& rows, int length) {
  return {rows.left, rows.right, length};
}

// Positions of a sequence's rows, and the tiles to which any of them attends. With a block mask, tiles count only
// selected blocks (kernels/decode/decode_block_mask.hpp); tile_in_sequence() maps them back.
struct DecodeSequence {
  int length;
  int position;     // position of row 0
  int first, last;  // tiles [first, last), without those of a prefix that the prefix launch computes; none: both are 0
  int begin_split;  // the first of the cache's splits with any of these tiles
  int splits;       // how many of the cache's splits have these tiles: a work tile each
  int selected;     // number of mask blocks before the rows' own blocks
  int gap;          // tiles before the rows' own blocks that the mask leaves out
  bool resumes;     // the split of the first tile resumes from the states that the prefix launch has stored

  // Whether a work tile finishes its rows: there is no other split.
  __device__ bool single() const { return splits == 1; }
};

// The prefix that the sequence shares, or −1.
template <class Params>
__device__ __forceinline__ int prefix_of(const Params& p, int sequence) {
  if (p.prefixes.of_sequence == nullptr) return -1;
  const int prefix = __ldcg(p.prefixes.of_sequence + sequence);
  return prefix >= 0 && prefix < p.prefixes.count ? prefix : -1;
}

// How many tiles of a prefix may be computed once for all its sequences: whole tiles, in pages that it fills.
template <class C, class Params>
__device__ __forceinline__ int prefix_tiles(const Params& p, int prefix) {
  const int keys = __ldcg(p.prefixes.keys + prefix) >> p.table.page_log << p.table.page_log;
  return keys > 0 ? keys / C::kKeyTile : 0;
}

// Whether any prefix has tiles of a partial split. All threads of a CTA call it.
template <class C, class Params>
__device__ __forceinline__ bool any_partial_split(const Params& p) {
  bool partial = false;
#pragma unroll 1
  for (int i = thread_of_cta(); i < p.prefixes.count; i += static_cast<int>(blockDim.x)) {
    partial = partial || prefix_tiles<C>(p, i) % kTilesPerKvSplit != 0;
  }
  return __syncthreads_or(partial ? 1 : 0) != 0;
}

// How many of its prefix's tiles are computed for the sequence by the prefix launch. All of them; or only those of
// whole splits, if a row doesn't see all keys of the others or attends to no tile after them; or none. So packing rows
// needs no test of single tiles. Prefixes need a kernel with FixedKvSplits.
template <class C>
__device__ __forceinline__ int shared_tiles(const WorkTileParams& p, int tiles, int length, int position) {
  const DecodeVisibility visibility = visibility_of(p.rows, length);
  const auto seen = visibility.common_keys(position, position + p.rows.per_sequence - 1);
  if (seen.begin != 0) return 0;
  const int whole = tiles / kTilesPerKvSplit * kTilesPerKvSplit;
  if (tiles > whole && tiles * C::kKeyTile <= seen.end &&
      tiles < visibility.tiles(position, TileSizes{kQueryTile, C::kKeyTile}).end) {
    return tiles;
  }
  return whole * C::kKeyTile <= seen.end ? whole : 0;
}

template <class Params>
__device__ __forceinline__ bool has_block_mask(const Params& p) {
  if constexpr (HasBlockMask<Params>) {
    return p.mask.indices != nullptr;
  } else {
    return false;
  }
}

// `mask_row` counts over all sequences.
template <class Params>
__device__ __forceinline__ int sequence_of_mask_row(const Params& p, int mask_row) {
  if constexpr (HasBlockMask<Params>) {
    if (p.mask.indices != nullptr) return p.mask.by_rows.quotient(mask_row);
  }
  return mask_row;
}

// Maps a tile that counts the keys selected by a mask row to a tile of the sequence. `mask_row` counts over all
// sequences.
template <class Params>
__device__ __forceinline__ int tile_in_sequence(const Params& p, int mask_row, int selected, int gap, int tile) {
  if constexpr (HasBlockMask<Params>) {
    if (p.mask.indices == nullptr) return tile;
    const int block_index = p.mask.by_block_tiles.quotient(tile);
    if (block_index >= selected) return tile + gap;
    return tile +
           (__ldcg(p.mask.indices + mask_row * p.mask.row_stride + block_index) - block_index) * p.mask.block_tiles;
  } else {
    return tile;
  }
}

// For the `mask_row`-th mask row of all sequences, or, without a mask, the `mask_row`-th sequence.
template <class C, class Params>
__device__ __forceinline__ DecodeSequence sequence_of(const Params& p, int mask_row) {
  using KvSplits = typename C::KvSplits;
  const int sequence = sequence_of_mask_row(p, mask_row);
  DecodeSequence info;
  info.length = __ldcg(p.rows.lengths + sequence);  // a kernel that is still running when this one starts may write it
  info.selected = 0;
  info.gap = 0;
  if constexpr (HasBlockMask<Params>) {
    if (p.mask.indices != nullptr) {
      const std::int32_t* const blocks = p.mask.indices + mask_row * p.mask.row_stride;
      const MaskedKeys keys =
          masked_keys(info.length, p.rows.per_sequence, p.mask.block_tiles * C::kKeyTile,
                      __ldcg(p.mask.counts + mask_row), [blocks](int i) { return __ldcg(blocks + i); });
      info.length = keys.keys;
      info.selected = keys.selected;
      info.gap = keys.gap() * p.mask.block_tiles;
    }
  }
  info.position = info.length - p.rows.per_sequence;
  const auto tiles =
      visibility_of(p.rows, info.length).tiles(info.position, p.rows.per_sequence, TileSizes{kQueryTile, C::kKeyTile});
  const bool none = tiles.empty();
  info.first = none ? 0 : tiles.begin;
  info.last = none ? 0 : tiles.end;
  info.resumes = false;
  if constexpr (HasPrefixes<Params>) {
    if (const int prefix = prefix_of(p, sequence); prefix >= 0) {
      const int shared = shared_tiles<C>(p, prefix_tiles<C>(p, prefix), info.length, info.position);
      if (shared > 0) info.first = shared;  // counts from 0
      info.resumes = shared % kTilesPerKvSplit != 0;
    }
  }
  // If no row attends to any tile there is still one work tile, without tiles, so that its rows are written.
  info.begin_split = KvSplits::of_tile(p, info.first);
  info.splits = none ? 1 : KvSplits::of_tile(p, info.last - 1) + 1 - info.begin_split;
  if (p.splits.stride > 1 || p.partials.data != nullptr) {
    const int end_split = none ? info.begin_split : info.begin_split + info.splits;
    const auto of_partition = [&p](int split) {
      return (split - p.splits.first + p.splits.stride - 1) / p.splits.stride;
    };
    info.begin_split = of_partition(info.begin_split);
    info.splits = of_partition(end_split) - info.begin_split;
  }
  return info;
}

struct DecodeWorkTile {
  DecodeSequence seq_info;
  int sequence, kv_head, block;
  int mask_row;      // counts over all sequences
  int number;        // counts all work tiles
  int cache_split;   // counts the splits of the sequence that the cache holds
  int begin, end;    // its tiles: those of the split that any row attends to
  int first_number;  // the work tile of the same rows in the sequence's first split
  int stride;        // distance from a work tile to that of the next split
  int lag;           // keys before the work tile's that the cache doesn't hold
  bool resumes;      // its rows resume from the states of their prefix
};

// Work tiles of a split, for the rows that share a mask row.
__device__ __forceinline__ int work_tile_stride(const WorkTileParams& p) { return p.blocks.kv_heads * p.blocks.count; }

// Fills the work tile table in the shared memory of `map`: how many work tiles come before each sequence or mask row.
// Returns the total. One warp calls it.
template <class C, class Map, class Params>
__device__ __forceinline__ int count_work_tiles(const Params& p, const Map& map) {
  const int lane = thread_of_cta() % 32;
  const int each = work_tile_stride(p);
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < p.blocks.sequences; first += 32) {
    const int s = first + lane;
    int sum = s < p.blocks.sequences ? sequence_of<C>(p, s).splits * each : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, sum, step);
      if (lane >= step) sum += other;
    }
    if (s < p.blocks.sequences) store_number(map.work_tiles_before(s + 1), before + sum);
    before += __shfl_sync(0xffffffffU, sum, 31);
  }
  if (lane == 0) store_number(map.work_tiles_before(0), 0);
  __syncwarp();
  return before;
}

template <class Map>
__device__ __forceinline__ int work_tile_count(const WorkTileParams& p, const Map& map) {
  return load_number(map.work_tiles_before(p.blocks.sequences));
}

// Work tile `number` of a sequence or mask row that `before` work tiles precede.
template <class C, class Params>
__device__ __forceinline__ DecodeWorkTile work_tile_in(const Params& p, int mask_row, int before, int number) {
  using KvSplits = typename C::KvSplits;
  DecodeWorkTile work_tile;
  work_tile.seq_info = sequence_of<C>(p, mask_row);
  work_tile.mask_row = mask_row;
  work_tile.sequence = sequence_of_mask_row(p, mask_row);
  work_tile.number = number;
  work_tile.stride = work_tile_stride(p);
  const int nth = p.blocks.by_stride.quotient(number - before);
  const int rest = (number - before) - nth * work_tile.stride;
  work_tile.kv_head = p.blocks.by_count.quotient(rest);
  work_tile.block = rest - work_tile.kv_head * p.blocks.count;
  if (has_block_mask(p)) {
    work_tile.kv_head +=
        (mask_row * p.blocks.kv_heads) - work_tile.sequence * p.attention.kv_heads;  // heads of the mask rows before
  }
  work_tile.first_number = before + rest;
  work_tile.cache_split = work_tile.seq_info.begin_split + nth;
  const int split = p.splits.first + work_tile.cache_split * p.splits.stride;
  work_tile.lag = (split - work_tile.cache_split) * (KvSplits::tiles(p) * C::kKeyTile);
  const int begin = split * KvSplits::tiles(p);
  const int end = begin + KvSplits::tiles(p);
  work_tile.begin = begin > work_tile.seq_info.first ? begin : work_tile.seq_info.first;
  work_tile.end = end < work_tile.seq_info.last ? end : work_tile.seq_info.last;
  work_tile.resumes = work_tile.seq_info.resumes && work_tile.begin == work_tile.seq_info.first;
  return work_tile;
}

template <class C, class Map, class Params>
__device__ __forceinline__ DecodeWorkTile work_tile_of(const Params& p, const Map& map, int number) {
  int sequence = 0;
#pragma unroll 1
  for (int count = p.blocks.sequences; count > 1;) {
    const int half = count / 2;
    const bool right = load_number(map.work_tiles_before(sequence + half)) <= number;
    sequence += right ? half : 0;
    count = right ? count - half : half;
  }
  return work_tile_in<C>(p, sequence, load_number(map.work_tiles_before(sequence)), number);
}

// The query rows of a work tile: their coordinates, visible keys and tiles.

// Farther than any key, in either direction.
inline constexpr int kNoKey = 1 << 30;

// How many rows a work tile has.
__device__ __forceinline__ int rows_of(const WorkTileParams& p, const DecodeWorkTile& work_tile) {
  const int left = p.rows.per_sequence * p.blocks.ratio - work_tile.block * p.blocks.rows;
  return left < p.blocks.rows ? left : p.blocks.rows;
}

// Coordinate in q and out of row `tile_row` of a work tile.
struct DecodeCoord {
  int row, query_head;
  int of_sequence;  // query token of its sequence
};
__device__ __forceinline__ DecodeCoord coord_of(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                                int tile_row) {
  const int number = work_tile.block * p.blocks.rows + tile_row;
  const int i = p.blocks.by_ratio.quotient(number);
  return {work_tile.sequence * p.rows.per_sequence + i,
          work_tile.kv_head * p.blocks.ratio + (number - i * p.blocks.ratio), i};
}

// The keys that a row sees, [low, high), and its tiles within the work tile, [begin, end). If it has none, both are the
// work tile's end.
struct RowRange {
  int low, high;
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowRange range_of(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                             const DecodeCoord& coord) {
  const DecodeVisibility visibility = visibility_of(p.rows, work_tile.seq_info.length);
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
template <class C, class Params>
__device__ __forceinline__ RowKvSplits splits_of(const Params& p, const DecodeWorkTile& work_tile,
                                                 const DecodeCoord& coord) {
  const auto tiles = visibility_of(p.rows, work_tile.seq_info.length)
                         .tiles(work_tile.seq_info.position + coord.of_sequence, TileSizes{kQueryTile, C::kKeyTile});
  if (tiles.empty()) return {0, 0};
  return {C::KvSplits::of_tile(p, tiles.begin), C::KvSplits::of_tile(p, tiles.end - 1) + 1};
}

// The keys that all rows of a work tile see.
__device__ __forceinline__ BasicKeyRange<int> common_keys(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                                          int rows) {
  const int last = coord_of(p, work_tile, rows - 1).of_sequence;
  const int first = coord_of(p, work_tile, 0).of_sequence;
  const auto keys = visibility_of(p.rows, work_tile.seq_info.length)
                        .common_keys(work_tile.seq_info.position + first, work_tile.seq_info.position + last);
  return keys.empty() ? BasicKeyRange<int>{kNoKey, 0} : keys;
}

// The two rows that a thread of the consumer warpgroup works on: `half` 0 and 1.
struct ThreadRows {
  DecodeCoord coord[2];
  bool present[2];  // else there is no such row, and the fields repeat the last row
  int low[2], high[2];
  int begin[2], end[2];
};

// `first`: the thread's tile row of half 0. The other one is 8 rows below it.
template <class C>
__device__ __forceinline__ ThreadRows thread_rows_of(const WorkTileParams& p, const DecodeWorkTile& work_tile,
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

// For the recomputed tile: the columns of a tile that a row sees.
template <class C>
__device__ __forceinline__ Columns visible_columns(const ThreadRows& thread_rows, int half, int number) {
  const int key = number * C::kKeyTile + thread_of_cta() % 4 * 2;
  return {thread_rows.low[half] - key, thread_rows.high[half] - key};
}

// Plain tiles [first, last) of a work tile: each row sees every key, and no row begins or ends there.
template <class C>
__device__ __forceinline__ BasicTileRange<int> plain_tiles(const WorkTileParams& p, const DecodeWorkTile& work_tile) {
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

// The epilogue.

inline constexpr int kDecodeBarrier = 1;  // named barrier of the threads that hold acc

// The divisor and LSE of a row, from its softmax_offset and sum over all keys.
__device__ __forceinline__ cuda::RowEnd end_of_row(const cuda::AttentionParams& p, int query_head, float softmax_offset,
                                                   float sum) {
  return cuda::end_row(__fmul_rn(softmax_offset, kLn2), sum, p.sinks == nullptr ? nullptr : p.sinks + query_head);
}
__device__ __forceinline__ void write_lse(const cuda::AttentionParams& p, int row, int query_head, float lse) {
  const auto& to = p.lse;
  if (to.data != nullptr) to.data[row * to.token_stride + query_head * to.head_stride] = lse;
}

// Writes two adjacent columns, divided and rounded.
template <class C>
__device__ __forceinline__ void write_pair(const cuda::AttentionParams& p, int row, int query_head, int column, float x,
                                           float y, float factor) {
  const auto& out = p.out;
  auto* const to =
      static_cast<std::uint16_t*>(out.data) + row * out.token_stride + query_head * out.head_stride + column;
  const std::uint32_t pair =
      cuda::MmaTraits<typename C::Element>::pack(cuda::scale_flushed(x, factor), cuda::scale_flushed(y, factor));
  if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// Whether a work tile finishes its rows: no other work tile or rank has a split of them.
__device__ __forceinline__ bool finishes(const WorkTileParams& p, const DecodeWorkTile& work_tile) {
  return p.partials.data == nullptr && work_tile.seq_info.single();
}

// Whether a kernel merges the splits of its rows. Otherwise all partials are for the caller or for merge.cu.
template <class Params>
concept MergesSplits = requires(const Params& p) {
  p.scratch;
};
template <class Params>
__device__ __forceinline__ int slices_of(const Params& p) {
  if constexpr (MergesSplits<Params>) {
    return p.slices;
  } else {
    return 1;
  }
}

// Address of the acc of a work tile's row in scratch. Columns are in the order of a saved AttentionState
// (attention/cuda/attention_state.cuh): of each block of 16 columns, thread t of a quad has 2t, 2t + 1, 2t + 8 and 2t +
// 9, adjacent in memory.
template <class C, class Params>
__device__ __forceinline__ float* outputs_of(const Params& p, int work_tile, int tile_row) {
  return p.scratch.outputs + (std::int64_t{work_tile} * p.blocks.rows + tile_row) * C::kDimV;
}
template <class Params>
__device__ __forceinline__ float2* stats_of(const Params& p, int work_tile, int slice, int tile_row) {
  return p.scratch.stats + ((std::int64_t{work_tile} * p.slices + slice) * p.blocks.rows + tile_row);
}
// The same if rows are not finished: a partial for the caller, acc and then stats.
__device__ __forceinline__ float* partial_of(const WorkTileParams& p, int cache_split, const DecodeCoord& coord) {
  return p.partials.data + ((coord.row * p.partials.splits + cache_split) * p.attention.heads + coord.query_head) *
                               (p.attention.head_dim_v + 4);
}
__device__ __forceinline__ float* partial_of(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                             const DecodeCoord& coord) {
  return partial_of(p, work_tile.cache_split, coord);
}
template <class C, class Params>
__device__ __forceinline__ float* partial_outputs(const Params& p, const DecodeWorkTile& work_tile, int tile_row,
                                                  const DecodeCoord& coord) {
  if constexpr (MergesSplits<Params>) {
    if (p.partials.data == nullptr) return outputs_of<C>(p, work_tile.number, tile_row);
  }
  return partial_of(p, work_tile, coord);
}
// One thread for each row calls it, for the slices [first, end).
template <class Params>
__device__ __forceinline__ void store_stats(const Params& p, const DecodeWorkTile& work_tile, int first, int end,
                                            int tile_row, const DecodeCoord& coord, float2 stats) {
  if (p.partials.data != nullptr) {
    if (first == 0) *reinterpret_cast<float2*>(partial_of(p, work_tile, coord) + p.attention.head_dim_v) = stats;
    return;
  }
  if constexpr (MergesSplits<Params>) {
    for (int slice = first; slice < end; ++slice) __stcg(stats_of(p, work_tile.number, slice, tile_row), stats);
  }
}

// Divides and rounds the columns of a row that one thread has.
template <class C>
struct FinishedRow {
  const cuda::AttentionParams& p;
  const DecodeCoord& coord;
  cuda::RowEnd end;

  __device__ FinishedRow(const cuda::AttentionParams& params, const DecodeCoord& of, float softmax_offset, float sum)
      : p(params), coord(of), end(end_of_row(params, of.query_head, softmax_offset, sum)) {}
  __device__ void write(int column, float x, float y) const {
    write_pair<C>(p, coord.row, coord.query_head, column, x, y, end.factor());
  }
  __device__ void write(int column, float x) const {
    const auto& out = p.out;
    auto* const to = static_cast<std::uint16_t*>(out.data) + coord.row * out.token_stride +
                     coord.query_head * out.head_stride + column;
    *to = static_cast<std::uint16_t>(
        cuda::MmaTraits<typename C::Element>::pack(cuda::scale_flushed(x, end.factor()), 0.0F));
  }
  // Two columns, divided and rounded.
  __device__ std::uint32_t pack(float x, float y) const {
    const float factor = end.factor();
    return cuda::MmaTraits<typename C::Element>::pack(cuda::scale_flushed(x, factor), cuda::scale_flushed(y, factor));
  }
  // Writes eight columns that pack() has rounded.
  __device__ void write(int column, const uint4& eight) const {
    const auto& out = p.out;
    auto* const to = static_cast<std::uint16_t*>(out.data) + coord.row * out.token_stride +
                     coord.query_head * out.head_stride + column;
    if (reinterpret_cast<std::uint64_t>(to) % 16 == 0) {
      *reinterpret_cast<uint4*>(to) = eight;
      return;
    }
    const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
  __device__ void write_lse() const { sm90::write_lse(p, coord.row, coord.query_head, end.lse()); }
};

// Stores a thread's acc of the row of `half`. `to` is the address of this CTA's columns.
template <class C>
__device__ __forceinline__ void store_accumulators(float* to, const AttentionState<C>& rows, int half) {
  auto* const outputs = reinterpret_cast<float4*>(to) + thread_of_cta() % 4;
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    __stcg(outputs + 4 * n, float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                                   rows.o[2 * n + 1][2 * half + 1]});
  }
}

// A row's state at the end of its prefix (PrefixStates::states). The prefix launch saves it, and the concurrent launch
// that follows resumes from it.
template <class Params>
__device__ __forceinline__ float* state_of(const Params& p, const DecodeCoord& coord) {
  return p.prefixes.states + (std::int64_t{coord.row} * p.attention.heads + coord.query_head) *
                                 (p.attention.head_dim_v + cuda::kStateStats);
}
template <class Params>
__device__ __forceinline__ float* state_stats(const Params& p, const DecodeCoord& coord) {
  return state_of(p, coord) + p.attention.head_dim_v;
}
// Waits until the states are saved. It can't deadlock: all CTAs of the prefix launch are resident already.
__device__ __forceinline__ void await_states() { cuda::pdl_wait(); }
// Saves the row of `half`, this CTA's columns from `first_column` on. The CTA with column 0 saves the stats.
template <class C, class Params>
__device__ __forceinline__ void save_row(const Params& p, const DecodeCoord& coord, const AttentionState<C>& rows,
                                         int half, int first_column) {
  store_accumulators(state_of(p, coord) + first_column, rows, half);
  if (first_column != 0) return;
  const int lane = thread_of_cta() % 4;
  float* const stats = state_stats(p, coord);
  __stcg(stats + lane, rows.l[half]);
  if (lane == 0) __stcg(stats + cuda::kCurrentOffset, offset_of(rows, half));
}
// Restores all columns of the row of `half`, after await_states().
template <class C, class Params>
__device__ __forceinline__ void restore_row(const Params& p, const DecodeCoord& coord, AttentionState<C>& rows,
                                            int half) {
  const int lane = thread_of_cta() % 4;
  const float* const stats = state_stats(p, coord);
  rows.l[half] = __ldcg(stats + lane);
  const float softmax_offset = __ldcg(stats + cuda::kCurrentOffset);
  if (softmax_offset != -INFINITY) {
    rows.flags |= AttentionState<C>::kOffsetSet << half;
    rows.shift[half] = -softmax_offset;
  }
  const auto* const outputs = reinterpret_cast<const float4*>(state_of(p, coord)) + lane;
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    rows.o[2 * n][2 * half] = x.x;
    rows.o[2 * n][2 * half + 1] = x.y;
    rows.o[2 * n + 1][2 * half] = x.z;
    rows.o[2 * n + 1][2 * half + 1] = x.w;
  }
}

// Finishes the row of `half` or stores its partial. `sum` is that of the row. `first_column` is this CTA's first column
// in a partial; the CTA with column 0 stores the stats.
template <class C, class Params>
__device__ __forceinline__ void store_row(const Params& p, const DecodeWorkTile& work_tile,
                                          const ThreadRows& thread_rows, const AttentionState<C>& rows, int half,
                                          float sum, int first_column = 0) {
  const int lane = thread_of_cta() % 4;
  const float softmax_offset = offset_of(rows, half);
  const int tile_row = tile_row_of_thread() + 8 * half;
  if (!finishes(p, work_tile)) {
    store_accumulators(partial_outputs<C>(p, work_tile, tile_row, thread_rows.coord[half]) + first_column, rows, half);
    if (lane == 0 && first_column == 0) {
      store_stats(p, work_tile, 0, slices_of(p), tile_row, thread_rows.coord[half], float2{softmax_offset, sum});
    }
    return;
  }
  const FinishedRow<C> finished(p.attention, thread_rows.coord[half], softmax_offset, sum);
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; ++n) {
    finished.write(8 * n + 2 * lane, rows.o[n][2 * half], rows.o[n][2 * half + 1]);
  }
  if (lane == 0) finished.write_lse();
}

// Four columns of a row, merged over its splits. at(split) returns where a split's acc and stats are.
struct MergedColumns {
  float4 outputs{0.0F, 0.0F, 0.0F, 0.0F};
  float softmax_offset = -INFINITY;
  float sum = 0.0F;
};
struct PartialAt {
  const float4* outputs;
  const float2* stats;
};
template <class At>
__device__ __forceinline__ MergedColumns merge_splits(int begin, int end, At at) {
  MergedColumns merged;
  constexpr int kBatch = 8;  // loads in flight
#pragma unroll 1
  for (int first = begin; first < end; first += kBatch) {
    float4 outputs[kBatch];
    float2 stats[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const PartialAt from = at(first + i);
      outputs[i] = __ldcg(from.outputs);
      stats[i] = __ldcg(from.stats);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const float4& x = outputs[i];
      if (first + i == begin) {
        merged = {x, stats[i].x, stats[i].y};
        continue;
      }
      const MergeStep step =
          cuda::merge_partials(merged.softmax_offset, merged.sum, stats[i].x, stats[i].y, kOffsetLog2Factor);
      merged.softmax_offset = step.softmax_offset;
      merged.sum = step.sum;
      using Arithmetic = cuda::TensorArithmetic;
      merged.outputs = {Arithmetic::join(merged.outputs.x, x.x, step), Arithmetic::join(merged.outputs.y, x.y, step),
                        Arithmetic::join(merged.outputs.z, x.z, step), Arithmetic::join(merged.outputs.w, x.w, step)};
    }
  }
  return merged;
}

// Finishes the four columns number `share` of a row.
template <class C>
__device__ __forceinline__ void write_merged(const cuda::AttentionParams& p, const DecodeCoord& coord, int share,
                                             const MergedColumns& merged) {
  const FinishedRow<C> finished(p, coord, merged.softmax_offset, merged.sum);
  const int column = share / 4 * 16 + share % 4 * 2;
  finished.write(column, merged.outputs.x, merged.outputs.y);
  finished.write(column + 8, merged.outputs.z, merged.outputs.w);
  if (share == 0) finished.write_lse();
}

// All threads with acc call it, `thread` of kThreads, after storing their slice of a work tile's partials. If it is the
// last work tile of the row block, its slice is merged.
template <class C, int kThreads, class Params>
__device__ __forceinline__ void merge_if_last(const Params& p, const DecodeWorkTile& work_tile, int thread, int slice) {
  __threadfence();
  named_sync(kDecodeBarrier, kThreads);
  bool last = false;
  if (thread == 0) {
    const std::int64_t rows =
        (std::int64_t{work_tile.sequence} * p.attention.kv_heads + work_tile.kv_head) * p.blocks.count +
        work_tile.block;
    std::int32_t* const arrived = p.scratch.arrived + rows * p.slices + slice;
    last = atomicAdd(arrived, 1) == work_tile.seq_info.splits - 1;
    if (last) *arrived = 0;  // resets the counter for the next step
  }
  if (!named_any(kDecodeBarrier, kThreads, last)) return;
  __threadfence();
  const int shares = C::kDimV / 4 / p.slices;
#pragma unroll 1
  for (int i = thread; i < rows_of(p, work_tile) * shares; i += kThreads) {
    const int tile_row = i / shares;
    const int share = slice * shares + i % shares;
    const DecodeCoord coord = coord_of(p, work_tile, tile_row);
    const RowKvSplits splits = splits_of<C>(p, work_tile, coord);
    write_merged<C>(p.attention, coord, share, merge_splits(splits.begin, splits.end, [&](int split) {
                      const int at =
                          work_tile.first_number + (split - work_tile.seq_info.begin_split) * work_tile.stride;
                      return PartialAt{reinterpret_cast<const float4*>(outputs_of<C>(p, at, tile_row)) + share,
                                       stats_of(p, at, slice, tile_row)};
                    }));
  }
}

}  // namespace ringattn::sm90
