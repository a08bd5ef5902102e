// SPDX-License-Identifier: Apache-2.0
// What a unit reads: its pages' numbers, its query rows, and tiles of K and V, whose rows lie wherever their pages do.
// Nothing behind a sequence's last key is read, not even its page.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm80/decode/units.cuh"

namespace ringattn::sm80 {

// All threads of the CTA; `pages` is in shared memory.
template <class C>
__device__ __forceinline__ void load_pages(const DecodeParams& p, const DecodeUnit& unit, std::int32_t* pages) {
  const int count = unit.pages(p, C::kKeyTile);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += C::kThreads) {
    pages[i] =
        p.pages == nullptr ? unit.sequence : __ldg(p.pages + unit.sequence * p.table_stride + unit.first_page + i);
  }
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
  const int token = tile * C::kKeyTile + unit.cache_offset + (present ? row : 0);
  const int page = pages[(token >> p.page_log) - unit.first_page];
  const auto of_page = static_cast<std::int64_t>(static_cast<unsigned>(token) & ((1U << p.page_log) - 1U));
  return {cache.data + unit.kv_head * cache.head_stride + page * cache.page_stride + of_page * cache.token_stride,
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
    const int token = first + (present ? row : 0);
    const int page = pages[(token >> p.page_log) - unit.first_page];
    const auto of_page = static_cast<std::int64_t>(static_cast<unsigned>(token) & ((1U << p.page_log) - 1U));
    const char* const from = head + page * cache.page_stride + of_page * cache.token_stride;
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
