// SPDX-License-Identifier: Apache-2.0
// How a step is cut into work tiles: one KV split of one sequence, for up to block_rows query rows of one KV head.
// Lengths are known only on the device, so every CTA counts the work tiles of all sequences. Work tile n belongs to CTA
// (or cluster) n modulo their number. Positions and tiles are 32-bit.
#pragma once

#include "kernels/attention/merge.hpp"
#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/decode/decode_block_mask.hpp"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

// The launch for what sequences have besides their shared prefixes runs concurrently with the prefix launch before it,
// which has waited for all earlier ones (prefix.cuh). So it waits at its end: when it is complete, both are. A reader
// of a prefix state waits before reading (finish.cuh).
__device__ __forceinline__ void pdl_wait_before_step(const DecodeParams& p) {
  if (p.prefix_of == nullptr) cuda::pdl_wait();
}
__device__ __forceinline__ void await_prefixes(const DecodeParams& p) {
  if (p.prefix_of != nullptr) cuda::pdl_wait();
}

// Tiles of a KV split, and the split of a tile: a constant of the kernel, or a launch parameter.
struct FixedKvSplits {
  static __device__ __forceinline__ int tiles(const DecodeParams&) { return kTilesPerKvSplit; }
  static __device__ __forceinline__ int of_tile(const DecodeParams&, int tile) { return tile / kTilesPerKvSplit; }
};
struct LaunchKvSplits {
  static __device__ __forceinline__ int tiles(const DecodeParams& p) { return 1 << p.split_tiles_log; }
  static __device__ __forceinline__ int of_tile(const DecodeParams& p, int tile) { return tile >> p.split_tiles_log; }
};

using DecodeVisibility = BasicVisibility<std::int32_t>;

__device__ __forceinline__ DecodeVisibility visibility_of(const DecodeParams& p, int length) {
  return {p.left, p.right, length};
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
__device__ __forceinline__ int prefix_of(const DecodeParams& p, int sequence) {
  if (p.prefix_of == nullptr) return -1;
  const int prefix = __ldcg(p.prefix_of + sequence);
  return prefix >= 0 && prefix < p.prefixes ? prefix : -1;
}

// How many tiles of a prefix may be computed once for all its sequences: whole tiles, in pages that it fills.
template <class C>
__device__ __forceinline__ int prefix_tiles(const DecodeParams& p, int prefix) {
  const int keys = __ldcg(p.prefix_keys + prefix) >> p.page_log << p.page_log;
  return keys > 0 ? keys / C::kKeyTile : 0;
}

// Whether any prefix has tiles of a partial split. All threads of a CTA call it.
template <class C>
__device__ __forceinline__ bool any_partial_split(const DecodeParams& p) {
  bool partial = false;
#pragma unroll 1
  for (int i = thread_of_cta(); i < p.prefixes; i += static_cast<int>(blockDim.x)) {
    partial = partial || prefix_tiles<C>(p, i) % kTilesPerKvSplit != 0;
  }
  return __syncthreads_or(partial ? 1 : 0) != 0;
}

// How many of its prefix's tiles are computed for the sequence by the prefix launch. All of them; or only those of
// whole splits, if a row doesn't see all keys of the others or attends to no tile after them; or none. So packing rows
// needs no test of single tiles. Prefixes need a kernel with FixedKvSplits.
template <class C>
__device__ __forceinline__ int shared_tiles(const DecodeParams& p, int tiles, int length, int position) {
  const DecodeVisibility visibility = visibility_of(p, length);
  const auto seen = visibility.common_keys(position, position + p.rows - 1);
  if (seen.begin != 0) return 0;
  const int whole = tiles / kTilesPerKvSplit * kTilesPerKvSplit;
  if (tiles > whole && tiles * C::kKeyTile <= seen.end &&
      tiles < visibility.tiles(position, TileSizes{kQueryTile, C::kKeyTile}).end) {
    return tiles;
  }
  return whole * C::kKeyTile <= seen.end ? whole : 0;
}

// Maps a tile that counts the keys selected by a mask row to a tile of the sequence. `mask_row` counts over all
// sequences.
__device__ __forceinline__ int tile_in_sequence(const DecodeParams& p, int mask_row, int selected, int gap, int tile) {
  if (p.mask_block_indices == nullptr) return tile;
  const int block_index = p.by_mask_block_tiles.quotient(tile);
  if (block_index >= selected) return tile + gap;
  return tile +
         (__ldcg(p.mask_block_indices + mask_row * p.mask_row_stride + block_index) - block_index) * p.mask_block_tiles;
}

// For the `mask_row`-th mask row of all sequences, or, without a mask, the `mask_row`-th sequence.
template <class C>
__device__ __forceinline__ DecodeSequence sequence_of(const DecodeParams& p, int mask_row) {
  using KvSplits = typename C::KvSplits;
  const int sequence = p.mask_block_indices == nullptr ? mask_row : p.by_mask_rows.quotient(mask_row);
  DecodeSequence info;
  info.length = __ldcg(p.lengths + sequence);  // a kernel that is still running when this one starts may write it
  info.selected = 0;
  info.gap = 0;
  if (p.mask_block_indices != nullptr) {
    const std::int32_t* const blocks = p.mask_block_indices + mask_row * p.mask_row_stride;
    const MaskedKeys keys =
        masked_keys(info.length, p.rows, p.mask_block_tiles * C::kKeyTile, __ldcg(p.mask_block_counts + mask_row),
                    [blocks](int i) { return __ldcg(blocks + i); });
    info.length = keys.keys;
    info.selected = keys.selected;
    info.gap = keys.gap() * p.mask_block_tiles;
  }
  info.position = info.length - p.rows;
  const auto tiles = visibility_of(p, info.length).tiles(info.position, p.rows, TileSizes{kQueryTile, C::kKeyTile});
  const bool none = tiles.empty();
  info.first = none ? 0 : tiles.begin;
  info.last = none ? 0 : tiles.end;
  info.resumes = false;
  if (const int prefix = prefix_of(p, sequence); prefix >= 0) {
    const int shared = shared_tiles<C>(p, prefix_tiles<C>(p, prefix), info.length, info.position);
    if (shared > 0) info.first = shared;  // counts from 0
    info.resumes = shared % kTilesPerKvSplit != 0;
  }
  // If no row attends to any tile there is still one work tile, without tiles, so that its rows are written.
  info.begin_split = KvSplits::of_tile(p, info.first);
  info.splits = none ? 1 : KvSplits::of_tile(p, info.last - 1) + 1 - info.begin_split;
  if (p.split_stride > 1 || p.partials != nullptr) {
    const int end_split = none ? info.begin_split : info.begin_split + info.splits;
    const auto of_partition = [&p](int split) { return (split - p.first_split + p.split_stride - 1) / p.split_stride; };
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
__device__ __forceinline__ int work_tile_stride(const DecodeParams& p) { return p.mask_kv_heads * p.blocks; }

// Fills the work tile table in the shared memory of `map`: how many work tiles come before each sequence or mask row.
// Returns the total. One warp calls it.
template <class C, class Map>
__device__ __forceinline__ int count_work_tiles(const DecodeParams& p, const Map& map) {
  const int lane = thread_of_cta() % 32;
  const int each = work_tile_stride(p);
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < p.sequences; first += 32) {
    const int s = first + lane;
    int sum = s < p.sequences ? sequence_of<C>(p, s).splits * each : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, sum, step);
      if (lane >= step) sum += other;
    }
    if (s < p.sequences) store_number(map.work_tiles_before(s + 1), before + sum);
    before += __shfl_sync(0xffffffffU, sum, 31);
  }
  if (lane == 0) store_number(map.work_tiles_before(0), 0);
  __syncwarp();
  return before;
}

template <class Map>
__device__ __forceinline__ int work_tile_count(const DecodeParams& p, const Map& map) {
  return load_number(map.work_tiles_before(p.sequences));
}

// Work tile `number` of a sequence or mask row that `before` work tiles precede.
template <class C>
__device__ __forceinline__ DecodeWorkTile work_tile_in(const DecodeParams& p, int mask_row, int before, int number) {
  using KvSplits = typename C::KvSplits;
  DecodeWorkTile work_tile;
  work_tile.seq_info = sequence_of<C>(p, mask_row);
  work_tile.mask_row = mask_row;
  work_tile.sequence = p.mask_block_indices == nullptr ? mask_row : p.by_mask_rows.quotient(mask_row);
  work_tile.number = number;
  work_tile.stride = work_tile_stride(p);
  const int nth = p.by_stride.quotient(number - before);
  const int rest = (number - before) - nth * work_tile.stride;
  work_tile.kv_head = p.by_blocks.quotient(rest);
  work_tile.block = rest - work_tile.kv_head * p.blocks;
  if (p.mask_block_indices != nullptr) {
    work_tile.kv_head +=
        (mask_row * p.mask_kv_heads) - work_tile.sequence * p.attention.kv_heads;  // heads of the mask rows before
  }
  work_tile.first_number = before + rest;
  work_tile.cache_split = work_tile.seq_info.begin_split + nth;
  const int split = p.first_split + work_tile.cache_split * p.split_stride;
  work_tile.lag = (split - work_tile.cache_split) * (KvSplits::tiles(p) * C::kKeyTile);
  const int begin = split * KvSplits::tiles(p);
  const int end = begin + KvSplits::tiles(p);
  work_tile.begin = begin > work_tile.seq_info.first ? begin : work_tile.seq_info.first;
  work_tile.end = end < work_tile.seq_info.last ? end : work_tile.seq_info.last;
  work_tile.resumes = work_tile.seq_info.resumes && work_tile.begin == work_tile.seq_info.first;
  return work_tile;
}

template <class C, class Map>
__device__ __forceinline__ DecodeWorkTile work_tile_of(const DecodeParams& p, const Map& map, int number) {
  int sequence = 0;
#pragma unroll 1
  for (int count = p.sequences; count > 1;) {
    const int half = count / 2;
    const bool right = load_number(map.work_tiles_before(sequence + half)) <= number;
    sequence += right ? half : 0;
    count = right ? count - half : half;
  }
  return work_tile_in<C>(p, sequence, load_number(map.work_tiles_before(sequence)), number);
}

}  // namespace ringattn::sm90
