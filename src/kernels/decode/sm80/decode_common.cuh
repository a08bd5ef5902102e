// SPDX-License-Identifier: Apache-2.0
// Device code that the decode kernels of sm80_attention share: work tiles, loads of a work tile, and the epilogue.
#pragma once

#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/attention/merge.hpp"
#include "kernels/attention/sm80/tile_step.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "kernels/decode/sm80/sm80_decode.hpp"

namespace ringattn::sm80 {

// Division of a decode step into work tiles. A work tile is one KV split of one sequence for the query rows of one KV
// head: up to 64 rows, or 32 with slices, all of one prefill query tile, so that they attend to the same KV tiles.
// Lengths are only on the device, so every CTA counts the work tiles of each sequence itself. CTA i computes the
// work tiles whose number is i modulo the number of CTAs.

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
__device__ __forceinline__ DecodeRowGroup row_group_of(const WorkTileParams& p, int length, int row_group) {
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
  const int ahead = (p.partition.first - split % p.partition.stride + p.partition.stride) %
                    p.partition.stride;  // splits until the partition's next one
  result.first_split = split + ahead;
  result.splits = result.first_split <= last_split ? (last_split - result.first_split) / p.partition.stride + 1 : 0;
  return result;
}

// Row blocks of a row group and KV head.
template <class C>
__device__ __forceinline__ int blocks_of(const WorkTileParams& p, const DecodeRowGroup& row_group) {
  return (row_group.rows * p.ratio + C::kQueryTile - 1) / C::kQueryTile;
}
template <class C>
__device__ __forceinline__ int work_tiles_of(const WorkTileParams& p, const DecodeRowGroup& row_group) {
  return row_group.splits * p.mask.kv_heads * blocks_of<C>(p, row_group);
}

// The keys that the rows of mask row `mask_row` see, over all sequences. Without a mask, `mask_row` is a sequence.
// Masked keys are treated as absent.
__device__ __forceinline__ MaskedKeys keys_of(const WorkTileParams& p, int mask_row) {
  if (p.mask.indices == nullptr) return {0, 0, __ldg(p.lengths + mask_row)};
  const std::int32_t* const blocks = p.mask.indices + mask_row * p.mask.row_stride;
  return masked_keys(__ldg(p.lengths + mask_row / p.mask.rows), p.rows, p.mask.block_keys,
                     __ldg(p.mask.counts + mask_row), [blocks](int i) { return __ldg(blocks + i); });
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
  int whole, whole_end;  // tiles in which every row sees every key
  int cache_offset;      // added to a key's index in its sequence gives its index in the cache
  int first_page;        // first page run of the work tile; each page run's keys lie in one page
  int mask_row;          // over all sequences
  int selected, gap;     // of the mask row's MaskedKeys
  int partial_index;     // index of its split among the row's partials
  int first_partial;     // the same for the row group's first split
  int splits;            // of the row group
  int arrived;           // index of the row group's counter

  __device__ __forceinline__ int pages(const WorkTileParams& p, int key_tile) const {
    const int keys = end * key_tile < length ? end * key_tile : length;
    return ((keys - 1 + cache_offset) >> p.table.page_run_log2) - first_page + 1;
  }
};

// Row of a tile row in q and out, and its query head.
struct DecodeRow {
  std::int64_t row;
  int head;
};
__device__ __forceinline__ DecodeRow row_of(const WorkTileParams& p, const DecodeWorkTile& work_tile, int tile_row) {
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
  __device__ explicit WorkTileFinder(const WorkTileParams& p) : p_(p) {}

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
    const int sequence = p_.mask.indices == nullptr ? mask_row : mask_row / p_.mask.rows;
    DecodeRowGroup row_group = row_group_of<C>(p_, length, 0);
    const int of_first = work_tiles_of<C>(p_, row_group);
    const int blocks_before = index < of_first ? 0 : blocks_of<C>(p_, row_group);
    if (index >= of_first) {
      index -= of_first;
      row_group = row_group_of<C>(p_, length, 1);
    }
    const int blocks = blocks_of<C>(p_, row_group);
    const int each = p_.mask.kv_heads * blocks;
    const int split = row_group.first_split + index / each * p_.partition.stride;
    const int rest = index % each;
    const int block = rest % blocks;
    const int begin = split * kTilesPerKvSplit;
    work_tile.sequence = sequence;
    work_tile.length = length;
    work_tile.position = row_group.position;
    work_tile.row = std::int64_t{sequence} * p_.rows + row_group.row;
    work_tile.kv_head = rest / blocks + mask_row * p_.mask.kv_heads - sequence * p_.attention.kv_heads;
    work_tile.mask_row = mask_row;
    work_tile.selected = keys.selected;
    work_tile.gap = keys.gap();
    work_tile.first = block * C::kQueryTile;
    const int left = row_group.rows * p_.ratio - work_tile.first;
    work_tile.tile_rows = left < C::kQueryTile ? left : C::kQueryTile;
    work_tile.begin = begin > row_group.first ? begin : row_group.first;
    work_tile.end = begin + kTilesPerKvSplit < row_group.last ? begin + kTilesPerKvSplit : row_group.last;
    work_tile.partial_index = split / p_.partition.stride;
    work_tile.first_partial = row_group.first_split / p_.partition.stride;
    work_tile.cache_offset = (work_tile.partial_index - split) * kTilesPerKvSplit * C::kKeyTile;
    work_tile.first_page = (work_tile.begin * C::kKeyTile + work_tile.cache_offset) >> p_.table.page_run_log2;
    work_tile.splits = row_group.splits;
    work_tile.arrived = (sequence * p_.attention.kv_heads + work_tile.kv_head) * p_.blocks + blocks_before + block;
    const std::int64_t last = work_tile.position + (work_tile.first + work_tile.tile_rows - 1) / p_.ratio;
    const KeyRange common =
        Visibility(p_.attention.mask, length).common_keys(work_tile.position + work_tile.first / p_.ratio, last);
    // If there is no such key, no tile is in this range.
    work_tile.whole = static_cast<int>(quotient(common.begin + C::kKeyTile - 1, C::kKeyTile));
    work_tile.whole_end = static_cast<int>(quotient(common.end, C::kKeyTile));
  }

  const WorkTileParams& p_;
  int sequence_ = 0;  // a multiple of 32; the last work tile found is not in a sequence before it
  int before_ = 0;    // work tiles of the sequences before sequence_
};

// Loads of a decode work tile: page numbers, query rows, and tiles of K and V, whose rows are scattered over pages.
// Neither data nor page numbers after a sequence's last key are read.

// Index of a page run of the keys of a mask row, counted in page runs of the cache, or of the sequence in a dense
// cache.
__device__ __forceinline__ std::int32_t masked_page_run(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                                        int page_run) {
  const int key = page_run << p.table.page_run_log2;
  const int block_index = key / p.mask.block_keys;
  const int block_shift =
      block_index >= work_tile.selected
          ? work_tile.gap
          : __ldg(p.mask.indices + work_tile.mask_row * p.mask.row_stride + block_index) - block_index;
  const int in_sequence = key + block_shift * p.mask.block_keys;
  if (p.table.pages == nullptr) return in_sequence >> p.table.page_run_log2;
  const int page_runs_log2 = p.table.page_log - p.table.page_run_log2;  // log2 of the page runs per page
  const int page = __ldg(p.table.pages + work_tile.sequence * p.table.stride + (in_sequence >> p.table.page_log));
  return (page << page_runs_log2) + ((in_sequence >> p.table.page_run_log2) & ((1 << page_runs_log2) - 1));
}

// Called by all threads of the CTA. `pages` is in shared memory.
template <class C>
__device__ __forceinline__ void load_pages(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                           std::int32_t* pages) {
  const int count = work_tile.pages(p, C::kKeyTile);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += C::kThreads) {
    if (p.mask.indices != nullptr) {
      pages[i] = masked_page_run(p, work_tile, work_tile.first_page + i);
      continue;
    }
    pages[i] = p.table.pages == nullptr
                   ? 0
                   : __ldg(p.table.pages + work_tile.sequence * p.table.stride + work_tile.first_page + i);
  }
}

// Page of a key of the work tile, and the token in the page. `token` is the key's index in the cache.
struct CachedKeyCoord {
  std::int64_t page, in_page;
};
__device__ __forceinline__ CachedKeyCoord locate_key(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                                     const std::int32_t* pages, int token) {
  const int page_run = pages[(token >> p.table.page_run_log2) - work_tile.first_page];
  const int more = p.table.page_log - p.table.page_run_log2;
  const unsigned in_page_run = static_cast<unsigned>(token) & ((1U << p.table.page_run_log2) - 1U);
  const unsigned before = (static_cast<unsigned>(page_run) & ((1U << more) - 1U)) << p.table.page_run_log2;
  return {p.table.pages == nullptr ? work_tile.sequence : page_run >> more, before + in_page_run};
}

// Copies the query rows of a work tile. Rows past tile_rows become zeros.
template <class C>
__device__ __forceinline__ void copy_queries(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                             std::uint32_t q_tile) {
  constexpr int kChunks = C::kDim / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < C::kQueryTile * kChunks; i += C::kThreads) {
    const int tile_row = i / kChunks;
    const int chunk = i % kChunks;
    const bool present = tile_row < work_tile.tile_rows;
    const DecodeRow row = row_of(p, work_tile, present ? tile_row : 0);
    const char* const from = static_cast<const char*>(p.attention.q.data) +
                             2 * (row.row * p.attention.q.token_stride + row.head * p.attention.q.head_stride) +
                             chunk * 16;
    cuda::copy_chunk(q_tile + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(C::kQueryTile)) +
                         cuda::swizzled(tile_row, chunk % 8),
                     from, present, p.q_aligned);
  }
}

// Address of a row of a tile in K or V, for the work tile's KV head. For a row after the sequence's last key, the
// address of the tile's first row.
struct CachedRow {
  const char* data;
  bool present;
};
template <class C>
__device__ __forceinline__ CachedRow cached_row(const WorkTileParams& p, const DecodeCache& cache,
                                                const DecodeWorkTile& work_tile, const std::int32_t* pages, int tile,
                                                int row) {
  const int keys = work_tile.length - tile * C::kKeyTile;  // may exceed the tile's
  const bool present = row < keys;
  const CachedKeyCoord at =
      locate_key(p, work_tile, pages, tile * C::kKeyTile + work_tile.cache_offset + (present ? row : 0));
  return {cache.data + work_tile.kv_head * cache.head_stride + at.page * cache.page_stride +
              at.in_page * cache.token_stride,
          present};
}

// Copies a tile of K or V. Rows after the sequence's last key become zeros.
template <class C, int kDim>
__device__ __forceinline__ void copy_keys(const WorkTileParams& p, const DecodeCache& cache,
                                          const DecodeWorkTile& work_tile, const std::int32_t* pages, int tile,
                                          std::uint32_t target) {
  constexpr int kPanels = (kDim + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
  const int chunk = static_cast<int>(threadIdx.x) % 8;
  const int keys = work_tile.length - tile * C::kKeyTile;  // may exceed the tile's
  const int first = tile * C::kKeyTile + work_tile.cache_offset;
  const char* const head = cache.data + work_tile.kv_head * cache.head_stride + chunk * 16;
#pragma unroll
  for (int i = 0; i < C::kKeyTile; i += C::kThreads / 8) {
    const int row = i + static_cast<int>(threadIdx.x) / 8;
    const bool present = row < keys;
    const CachedKeyCoord at = locate_key(p, work_tile, pages, first + (present ? row : 0));
    const char* const from = head + at.page * cache.page_stride + at.in_page * cache.token_stride;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel * 8 + chunk >= kDim / 8) break;
      cuda::copy_16(
          target + static_cast<std::uint32_t>(panel * cuda::panel_bytes(C::kKeyTile)) + cuda::swizzled(row, chunk),
          from + panel * cuda::kPanelRowBytes, present);
    }
  }
}

// Decode epilogue. A work tile writes its partials. The CTA that writes the last ones of a row group merges them in
// ascending order with the prefill's merge step (kernels/attention/merge.hpp).

// Writes two neighbouring columns, normalized and rounded.
template <class Element>
__device__ __forceinline__ void write_pair(const cuda::AttentionParams& p, std::int64_t row, int head, int column,
                                           float x, float y, float factor) {
  auto* const to =
      static_cast<std::uint16_t*>(p.out.data) + row * p.out.token_stride + head * p.out.head_stride + column;
  const std::uint32_t pair = cuda::MmaTraits<Element>::pack(__fmul_rn(x, factor), __fmul_rn(y, factor));
  if (reinterpret_cast<std::uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// Writes column quad 4n + t of a row: columns 16n + 2t, 16n + 2t + 1 and the two columns 8 after them.
template <class Element>
__device__ __forceinline__ void write_columns(const cuda::AttentionParams& p, std::int64_t row, int head,
                                              int column_quad, const float4& x, float factor) {
  const int column = column_quad / 4 * 16 + column_quad % 4 * 2;
  write_pair<Element>(p, row, head, column, x.x, x.y, factor);
  write_pair<Element>(p, row, head, column + 8, x.z, x.w, factor);
}

__device__ __forceinline__ cuda::RowEnd end_of_row(const cuda::AttentionParams& p, int head, float softmax_offset,
                                                   float sum) {
  return cuda::end_row(__fmul_rn(softmax_offset, p.softmax.exponent), sum,
                       p.sinks == nullptr ? nullptr : p.sinks + head);
}
__device__ __forceinline__ void write_lse(const cuda::AttentionParams& p, std::int64_t row, int head, float lse) {
  if (p.lse.data != nullptr) p.lse.data[row * p.lse.token_stride + head * p.lse.head_stride] = lse;
}

// Address of a partial. A column quad of its row is one float4.
template <class Float>
__device__ __forceinline__ Float* partial_at(Float* partials, std::int64_t splits, const cuda::AttentionParams& p,
                                             std::int64_t row, std::int64_t split, int head) {
  return partials + ((row * splits + split) * p.heads + head) * partial_floats(p.head_dim_v);
}

// Merges a column quad of a row over `splits` splits, then normalizes, rounds and writes it. partial(i) returns the
// address of the i-th partial.
template <class Element, class PartialAt>
__device__ __forceinline__ void finish_columns(const cuda::AttentionParams& p, std::int64_t row, int head,
                                               int column_quad, int splits, PartialAt partial) {
  float4 merged{0.0F, 0.0F, 0.0F, 0.0F};
  float softmax_offset = -INFINITY;
  float sum = 0.0F;
  constexpr int kBatch = 8;  // partials loaded at a time
  for (int batch = 0; batch < splits; batch += kBatch) {
    float4 outputs[kBatch];
    float2 stats[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= splits) break;
      const float* const at = partial(batch + i);
      outputs[i] = __ldcg(reinterpret_cast<const float4*>(at) + column_quad);
      stats[i] = __ldcg(reinterpret_cast<const float2*>(at + p.head_dim_v));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch + i >= splits) break;
      if (batch + i == 0) {
        merged = outputs[i];
        softmax_offset = stats[i].x;
        sum = stats[i].y;
        continue;
      }
      const MergeStep step =
          cuda::merge_partials(softmax_offset, sum, stats[i].x, stats[i].y, p.softmax.exponent_base2);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
      merged = join(merged, outputs[i], step);
    }
  }
  const cuda::RowEnd end = end_of_row(p, head, softmax_offset, sum);
  write_columns<Element>(p, row, head, column_quad, merged, end.factor());
  if (column_quad == 0) write_lse(p, row, head, end.lse());
}

template <class C>
__device__ __forceinline__ void store_partials(const WorkTileParams& p, const DecodeWorkTile& work_tile,
                                               const AttentionState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  for_each_row<C>([&](int block, int half, int tile_row) {
    const float sum = quad_sum(state.l[block][half]);
    if (tile_row >= work_tile.tile_rows) return;
    const DecodeRow row = row_of(p, work_tile, tile_row);
    auto* const partial = reinterpret_cast<float4*>(
        partial_at(p.partials.data, p.partials.splits, p.attention, row.row, work_tile.partial_index, row.head));
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      __stcg(partial + first_column<C>() / 4 + 4 * n + lane, thread_columns(state, block, half, n));
    }
    if (writes_stats<C>()) __stcg(partial + C::kDimV / 4, float4{state.m[block][half], sum, 0.0F, 0.0F});
  });
}

// Called by the whole CTA after it has written a work tile's partials. If they are the last ones of the tile's rows,
// merges all of them.
template <class C>
__device__ __forceinline__ void merge_if_last(const WorkTileParams& p, const DecodeWorkTile& work_tile) {
  if (work_tile.splits > 1) {
    __threadfence();
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
      last = atomicAdd(p.arrived + work_tile.arrived, 1) == work_tile.splits - 1 ? 1 : 0;
      if (last != 0) p.arrived[work_tile.arrived] = 0;  // for the next decode step
    }
    if (__syncthreads_or(last) == 0) return;
    __threadfence();
  } else {
    __syncthreads();
  }
  constexpr int kColumnQuads = C::kDimV / 4;
  for (int i = static_cast<int>(threadIdx.x); i < work_tile.tile_rows * kColumnQuads; i += C::kThreads) {
    const DecodeRow row = row_of(p, work_tile, i / kColumnQuads);
    finish_columns<typename C::Element>(
        p.attention, row.row, row.head, i % kColumnQuads, work_tile.splits, [&](int split) {
          return partial_at(static_cast<const float*>(p.partials.data), p.partials.splits, p.attention, row.row,
                            std::int64_t{work_tile.first_partial} + split, row.head);
        });
  }
}

}  // namespace ringattn::sm80
