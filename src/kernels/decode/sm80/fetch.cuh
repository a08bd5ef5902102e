// SPDX-License-Identifier: Apache-2.0
// Loads of a decode work tile: page numbers, query rows, and tiles of K and V, whose rows are scattered over pages.
// Neither data nor page numbers after a sequence's last key are read.
#pragma once

#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/decode/sm80/work_tiles.cuh"

namespace ringattn::sm80 {

// Index of a page run of the keys of a mask row, counted in page runs of the cache, or of the sequence in a dense
// cache.
__device__ __forceinline__ std::int32_t masked_page_run(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                        int page_run) {
  const int key = page_run << p.page_run_log2;
  const int block_index = key / p.mask_block_keys;
  const int block_shift =
      block_index >= work_tile.selected
          ? work_tile.gap
          : __ldg(p.mask_block_indices + work_tile.mask_row * p.mask_row_stride + block_index) - block_index;
  const int in_sequence = key + block_shift * p.mask_block_keys;
  if (p.pages == nullptr) return in_sequence >> p.page_run_log2;
  const int page_runs_log2 = p.page_log - p.page_run_log2;  // log2 of the page runs per page
  const int page = __ldg(p.pages + work_tile.sequence * p.table_stride + (in_sequence >> p.page_log));
  return (page << page_runs_log2) + ((in_sequence >> p.page_run_log2) & ((1 << page_runs_log2) - 1));
}

// Called by all threads of the CTA. `pages` is in shared memory.
template <class C>
__device__ __forceinline__ void load_pages(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                           std::int32_t* pages) {
  const int count = work_tile.pages(p, C::kKeyTile);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += C::kThreads) {
    if (p.mask_block_indices != nullptr) {
      pages[i] = masked_page_run(p, work_tile, work_tile.first_page + i);
      continue;
    }
    pages[i] = p.pages == nullptr ? 0 : __ldg(p.pages + work_tile.sequence * p.table_stride + work_tile.first_page + i);
  }
}

// Page and token in the page of a key of the work tile, where `token` is its index in the cache.
struct CachedKeyCoord {
  std::int64_t page, in_page;
};
__device__ __forceinline__ CachedKeyCoord locate_key(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                     const std::int32_t* pages, int token) {
  const int page_run = pages[(token >> p.page_run_log2) - work_tile.first_page];
  const int more = p.page_log - p.page_run_log2;
  const unsigned in_page_run = static_cast<unsigned>(token) & ((1U << p.page_run_log2) - 1U);
  const unsigned before = (static_cast<unsigned>(page_run) & ((1U << more) - 1U)) << p.page_run_log2;
  return {p.pages == nullptr ? work_tile.sequence : page_run >> more, before + in_page_run};
}

// Copies the query rows of a work tile. Rows past tile_rows become zeros.
template <class C>
__device__ __forceinline__ void copy_queries(const DecodeParams& p, const DecodeWorkTile& work_tile,
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
__device__ __forceinline__ CachedRow cached_row(const DecodeParams& p, const DecodeCache& cache,
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
__device__ __forceinline__ void copy_keys(const DecodeParams& p, const DecodeCache& cache,
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

}  // namespace ringattn::sm80
