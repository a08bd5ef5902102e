// SPDX-License-Identifier: Apache-2.0
// What a unit reads: its pages' numbers, its query rows, and tiles of K and V, whose rows lie wherever their pages do.
// Nothing behind a sequence's last key is read, not even its page.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm80/decode/units.cuh"

namespace ringattn::sm80 {

// Where a piece of the keys that a list leaves lies: as a number of pieces of the cache, or of the sequence in a dense
// one.
__device__ __forceinline__ std::int32_t listed_piece(const DecodeParams& p, const DecodeUnit& unit, int piece) {
  const int key = piece << p.piece_log;
  const int place = key / p.list_keys;
  const int further =
      place >= unit.listed ? unit.gap : __ldg(p.list_blocks + unit.list * p.list_stride + place) - place;
  const int in_sequence = key + further * p.list_keys;
  if (p.pages == nullptr) return in_sequence >> p.piece_log;
  const int of_page = p.page_log - p.piece_log;  // of 2: pieces
  const int page = __ldg(p.pages + unit.sequence * p.table_stride + (in_sequence >> p.page_log));
  return (page << of_page) + ((in_sequence >> p.piece_log) & ((1 << of_page) - 1));
}

// All threads of the CTA; `pages` is in shared memory.
template <class C>
__device__ __forceinline__ void load_pages(const DecodeParams& p, const DecodeUnit& unit, std::int32_t* pages) {
  const int count = unit.pages(p, C::kKeyTile);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += C::kThreads) {
    if (p.list_blocks != nullptr) {
      pages[i] = listed_piece(p, unit, unit.first_page + i);
      continue;
    }
    pages[i] = p.pages == nullptr ? 0 : __ldg(p.pages + unit.sequence * p.table_stride + unit.first_page + i);
  }
}

// Where a key of the unit lies, `token` among those that its rows see.
struct CachePlaceOfKey {
  std::int64_t page, of_page;
};
__device__ __forceinline__ CachePlaceOfKey place_of_key(const DecodeParams& p, const DecodeUnit& unit,
                                                        const std::int32_t* pages, int token) {
  const int piece = pages[(token >> p.piece_log) - unit.first_page];
  const int more = p.page_log - p.piece_log;
  const unsigned in_piece = static_cast<unsigned>(token) & ((1U << p.piece_log) - 1U);
  const unsigned before = (static_cast<unsigned>(piece) & ((1U << more) - 1U)) << p.piece_log;
  return {p.pages == nullptr ? unit.sequence : piece >> more, before + in_piece};
}

// Slots without a row become zeros.
template <class C>
__device__ __forceinline__ void copy_queries(const DecodeParams& p, const DecodeUnit& unit, std::uint32_t q_tile) {
  constexpr int kChunks = C::kDim / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < C::kQueryTile * kChunks; i += C::kThreads) {
    const int slot = i / kChunks;
    const int chunk = i % kChunks;
    const bool present = slot < unit.slots;
    const DecodeRow row = row_of(p, unit, present ? slot : 0);
    const char* const from = static_cast<const char*>(p.fold.q.data) +
                             2 * (row.row * p.fold.q.token_stride + row.head * p.fold.q.head_stride) + chunk * 16;
    cuda::copy_chunk(q_tile + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(C::kQueryTile)) +
                         cuda::swizzled(slot, chunk % 8),
                     from, present, p.q_aligned);
  }
}

// Where a row of a tile lies in K or V, for the unit's KV head; of a row behind the sequence's last key, the tile's
// first one.
struct CachedRow {
  const char* data;
  bool present;
};
template <class C>
__device__ __forceinline__ CachedRow cached_row(const DecodeParams& p, const DecodeCache& cache, const DecodeUnit& unit,
                                                const std::int32_t* pages, int tile, int row) {
  const int keys = unit.length - tile * C::kKeyTile;  // maybe more than the tile's
  const bool present = row < keys;
  const CachePlaceOfKey at = place_of_key(p, unit, pages, tile * C::kKeyTile + unit.cache_offset + (present ? row : 0));
  return {cache.data + unit.kv_head * cache.head_stride + at.page * cache.page_stride + at.of_page * cache.token_stride,
          present};
}

// A tile of K or V; rows behind the sequence's last key become zeros.
template <class C, int kDim>
__device__ __forceinline__ void copy_keys(const DecodeParams& p, const DecodeCache& cache, const DecodeUnit& unit,
                                          const std::int32_t* pages, int tile, std::uint32_t target) {
  constexpr int kPanels = (kDim + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
  const int chunk = static_cast<int>(threadIdx.x) % 8;
  const int keys = unit.length - tile * C::kKeyTile;  // maybe more than the tile's
  const int first = tile * C::kKeyTile + unit.cache_offset;
  const char* const head = cache.data + unit.kv_head * cache.head_stride + chunk * 16;
#pragma unroll
  for (int i = 0; i < C::kKeyTile; i += C::kThreads / 8) {
    const int row = i + static_cast<int>(threadIdx.x) / 8;
    const bool present = row < keys;
    const CachePlaceOfKey at = place_of_key(p, unit, pages, first + (present ? row : 0));
    const char* const from = head + at.page * cache.page_stride + at.of_page * cache.token_stride;
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
