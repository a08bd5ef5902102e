// SPDX-License-Identifier: Apache-2.0
// Division of a decode step into work tiles. A work tile is one KV split of one sequence for the query rows of one KV
// head: up to 64 rows, or 32 with slices, all of one prefill query tile, so that they attend to the same KV tiles.
// Lengths are only on the device, so every CTA counts the work tiles of each sequence itself. CTA i computes the
// work tiles whose number is i modulo the number of CTAs.
#pragma once

#include "kernels/attention/merge.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "kernels/decode/sm80/decode_params.hpp"

namespace ringattn::sm80 {

// Rows of a sequence in one prefill query tile, and the KV splits of the partition that they attend to.
struct DecodeRowGroup {
  int row, rows;          // among the sequence's rows
  std::int64_t position;  // of the first of these rows
  int first, last;        // KV tiles [first, last) of the sequence
  int first_split;        // in the partition
  int splits;  // in the partition; one empty split if the rows attend to no tile and this launch writes the results
};

// A query tile is larger than the rows of a decode step, so the rows lie in at most two: row groups 0 and 1.
template <class C>
__device__ __forceinline__ DecodeRowGroup row_group_of(const DecodeParams& p, int length, int row_group) {
  static_assert(C::kPrefillTile >= kMaxDecodeRows);
  const std::int64_t position = std::int64_t{length} - p.rows;
  const int offset = static_cast<int>(query_tile_begin(position, C::kPrefillTile) + C::kPrefillTile - position);
  const int of_first = offset < p.rows ? offset : p.rows;
  DecodeRowGroup result{};
  result.row = row_group == 0 ? 0 : of_first;
  result.rows = row_group == 0 ? of_first : p.rows - of_first;
  result.position = position + result.row;
  if (result.rows == 0) return result;
  const TileRange tiles =
      Visibility(p.attention.mask, length).tiles(result.position, TileSizes{C::kPrefillTile, C::kKeyTile});
  if (tiles.empty()) {
    result.splits = p.finish ? 1 : 0;
    return result;
  }
  result.first = static_cast<int>(tiles.begin);
  result.last = static_cast<int>(tiles.end);
  const int split = result.first / kTilesPerKvSplit;
  const int last_split = (result.last - 1) / kTilesPerKvSplit;
  const int ahead = (p.partition_first - split % p.partition_stride + p.partition_stride) %
                    p.partition_stride;  // splits until the partition's next one
  result.first_split = split + ahead;
  result.splits = result.first_split <= last_split ? (last_split - result.first_split) / p.partition_stride + 1 : 0;
  return result;
}

// Row blocks of a row group and KV head.
template <class C>
__device__ __forceinline__ int blocks_of(const DecodeParams& p, const DecodeRowGroup& row_group) {
  return (row_group.rows * p.ratio + C::kQueryTile - 1) / C::kQueryTile;
}
template <class C>
__device__ __forceinline__ int work_tiles_of(const DecodeParams& p, const DecodeRowGroup& row_group) {
  return row_group.splits * p.mask_kv_heads * blocks_of<C>(p, row_group);
}

// The keys that the rows of mask row `mask_row` see, over all sequences. Without a mask, `mask_row` is a sequence.
// Masked keys are treated as absent.
__device__ __forceinline__ MaskedKeys keys_of(const DecodeParams& p, int mask_row) {
  if (p.mask_block_indices == nullptr) return {0, 0, __ldg(p.lengths + mask_row)};
  const std::int32_t* const blocks = p.mask_block_indices + mask_row * p.mask_row_stride;
  return masked_keys(__ldg(p.lengths + mask_row / p.mask_rows), p.rows, p.mask_block_keys,
                     __ldg(p.mask_block_counts + mask_row), [blocks](int i) { return __ldg(blocks + i); });
}

// A work tile in shared memory. Its tile rows are the rows of the MMAs.
struct DecodeWorkTile {
  int sequence, length;
  std::int64_t position;  // of the first row of its row group
  std::int64_t row;       // index of the same row in q
  int kv_head;
  int first;  // index of tile row 0 among the row group's rows · ratio; row i of query head h has index i · ratio + h
  int tile_rows;         // valid rows; 0: there is no such work tile
  int begin, end;        // KV tiles that it attends to, within one split
  int whole, whole_end;  // those of which every row sees every key
  int cache_offset;      // added to a key's index in its sequence gives its index in the cache
  int first_page;        // first page run of the work tile; each page run's keys lie in one page
  int mask_row;          // over all sequences
  int selected, gap;     // of the mask row's MaskedKeys
  int partial_index;     // index of its split among the row's partials
  int first_partial;     // the same for the row group's first split
  int splits;            // of the row group
  int arrived;           // index of the row group's counter

  __device__ __forceinline__ int pages(const DecodeParams& p, int key_tile) const {
    const int keys = end * key_tile < length ? end * key_tile : length;
    return ((keys - 1 + cache_offset) >> p.page_run_log2) - first_page + 1;
  }
};

// Row of a tile row in q and out, and its query head.
struct DecodeRow {
  std::int64_t row;
  int head;
};
__device__ __forceinline__ DecodeRow row_of(const DecodeParams& p, const DecodeWorkTile& work_tile, int tile_row) {
  const int number = work_tile.first + tile_row;
  const int i = number / p.ratio;
  return {work_tile.row + i, work_tile.kv_head * p.ratio + (number - i * p.ratio)};
}

// The `Rows` of TileStep.
struct DecodeRows {
  const DecodeWorkTile& work_tile;
  int ratio;

  __device__ __forceinline__ auto positions(int tile_row, std::int64_t first_key) const {
    return [this, tile_row, first_key](int offset) {
      return work_tile.position - first_key + (work_tile.first + tile_row + offset) / ratio;
    };
  }
  __device__ std::int64_t key_length() const { return work_tile.length; }
};

// Finds work tiles in ascending order. Called by all threads of one warp.
template <class C>
class WorkTileFinder {
 public:
  __device__ explicit WorkTileFinder(const DecodeParams& p) : p_(p) {}

  // Writes work tile `number`.
  __device__ __forceinline__ void find(int number, DecodeWorkTile& work_tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (; sequence_ < p_.sequences; sequence_ += 32) {
      const int s = sequence_ + lane;
      const MaskedKeys keys = s < p_.sequences ? keys_of(p_, s) : MaskedKeys{};
      const int length = keys.keys;
      int count = 0;
      if (s < p_.sequences)
        count =
            work_tiles_of<C>(p_, row_group_of<C>(p_, length, 0)) + work_tiles_of<C>(p_, row_group_of<C>(p_, length, 1));
      int sum = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffU, sum, step);
        if (lane >= step) sum += other;
      }
      const int index = number - before_;
      if (index >= sum - count && index < sum) write(s, keys, index - (sum - count), work_tile);
      const int all = __shfl_sync(0xffffffffU, sum, 31);
      if (index < all) return;
      before_ += all;
    }
    if (lane == 0) work_tile.tile_rows = 0;
  }

 private:
  // Writes work tile `index` of a mask row.
  __device__ void write(int mask_row, const MaskedKeys& keys, int index, DecodeWorkTile& work_tile) const {
    const int length = keys.keys;
    const int sequence = p_.mask_block_indices == nullptr ? mask_row : mask_row / p_.mask_rows;
    DecodeRowGroup row_group = row_group_of<C>(p_, length, 0);
    const int of_first = work_tiles_of<C>(p_, row_group);
    const int blocks_before = index < of_first ? 0 : blocks_of<C>(p_, row_group);
    if (index >= of_first) {
      index -= of_first;
      row_group = row_group_of<C>(p_, length, 1);
    }
    const int blocks = blocks_of<C>(p_, row_group);
    const int each = p_.mask_kv_heads * blocks;
    const int split = row_group.first_split + index / each * p_.partition_stride;
    const int rest = index % each;
    const int block = rest % blocks;
    const int begin = split * kTilesPerKvSplit;
    work_tile.sequence = sequence;
    work_tile.length = length;
    work_tile.position = row_group.position;
    work_tile.row = std::int64_t{sequence} * p_.rows + row_group.row;
    work_tile.kv_head = rest / blocks + mask_row * p_.mask_kv_heads - sequence * p_.attention.kv_heads;
    work_tile.mask_row = mask_row;
    work_tile.selected = keys.selected;
    work_tile.gap = keys.gap();
    work_tile.first = block * C::kQueryTile;
    const int left = row_group.rows * p_.ratio - work_tile.first;
    work_tile.tile_rows = left < C::kQueryTile ? left : C::kQueryTile;
    work_tile.begin = begin > row_group.first ? begin : row_group.first;
    work_tile.end = begin + kTilesPerKvSplit < row_group.last ? begin + kTilesPerKvSplit : row_group.last;
    work_tile.partial_index = split / p_.partition_stride;
    work_tile.first_partial = row_group.first_split / p_.partition_stride;
    work_tile.cache_offset = (work_tile.partial_index - split) * kTilesPerKvSplit * C::kKeyTile;
    work_tile.first_page = (work_tile.begin * C::kKeyTile + work_tile.cache_offset) >> p_.page_run_log2;
    work_tile.splits = row_group.splits;
    work_tile.arrived = (sequence * p_.attention.kv_heads + work_tile.kv_head) * p_.blocks + blocks_before + block;
    const std::int64_t last = work_tile.position + (work_tile.first + work_tile.tile_rows - 1) / p_.ratio;
    const KeyRange common =
        Visibility(p_.attention.mask, length).common_keys(work_tile.position + work_tile.first / p_.ratio, last);
    // If there is no such key, no tile is in this range.
    work_tile.whole = static_cast<int>(quotient(common.begin + C::kKeyTile - 1, C::kKeyTile));
    work_tile.whole_end = static_cast<int>(quotient(common.end, C::kKeyTile));
  }

  const DecodeParams& p_;
  int sequence_ = 0;  // a multiple of 32; the last work tile found is not in a sequence before it
  int before_ = 0;    // work tiles of the sequences before sequence_
};

}  // namespace ringattn::sm80
