// SPDX-License-Identifier: Apache-2.0
// Loads of strips of KV tiles into shared memory. A strip of K has all keys of the tile and kStripColumns columns, the
// last one possibly fewer. A strip of V has kStripKeys keys and all columns. Both have the same size, so they share the
// pipeline stages: first the strips of K, then those of V.
//
// A `Keys` locates the keys and values of a tile: k_row(tile, row) and v_row(tile, row) return a row's address. For
// quantized rows, prefetch_strip() and copy_strip() are overloaded (decode/sm80/compressed.cuh).
#pragma once

#include <cstdint>

#include "kernels/attention/sm80/config.hpp"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

// Address of a row of K or V of one head.
struct RowAddress {
  const char* data;
  bool present;  // false: the sequence has no such key, and nothing is read
  bool aligned;  // to 16 bytes
};

template <class C>
struct Strips {
  static constexpr int kKStrips = (C::kDim + kStripColumns - 1) / kStripColumns;
  static constexpr int kVStrips = C::kKeyTile / kStripKeys;
  static constexpr int kTileStrips = kKStrips + kVStrips;  // per tile
  static constexpr int kBytes = cuda::kTileBytes<kStripKeys, C::kDimV>;

  // Columns of strip `strip` of K.
  static constexpr int columns(int strip) {
    return strip + 1 < kKStrips ? kStripColumns : C::kDim - (kKStrips - 1) * kStripColumns;
  }

  static_assert(cuda::kTileBytes<C::kKeyTile, kStripColumns> == kBytes);
  static_assert(C::kDim % cuda::kPanelColumns == 0 && C::kDimV % kStripColumns == 0);
};

// Called before the first copy_strip(). Each copy_strip() then prefetches the strip after it.
template <class C, class Keys>
__device__ __forceinline__ void prefetch_strip(const Keys&, int, int) {}

// Copies strip `strip` of the tile with all threads. 16 neighbouring threads copy 256 bytes of a row.
template <class C, class Keys>
__device__ __forceinline__ void copy_strip(const Keys& keys, int tile, int strip, std::uint32_t target) {
  using S = Strips<C>;
  constexpr int kThreadsOfRow = kStripColumns / 8;
  static_assert(C::kThreads == kStripKeys * kThreadsOfRow);
  const int row = static_cast<int>(threadIdx.x) / kThreadsOfRow;  // 0 … 15
  const int first = static_cast<int>(threadIdx.x) % kThreadsOfRow;
  if (strip < S::kKStrips) {
    if (first >= S::columns(strip) / 8) return;
#pragma unroll 1
    for (int i = 0; i < C::kKeyTile; i += kStripKeys) {
      const RowAddress from = keys.k_row(tile, i + row);
      cuda::copy_chunk(target + static_cast<std::uint32_t>(first / 8 * cuda::panel_bytes(C::kKeyTile)) +
                           cuda::swizzled(i + row, first % 8),
                       from.data + strip * kStripColumns * 2 + first * 16, from.present, from.aligned);
    }
    return;
  }
  const RowAddress from = keys.v_row(tile, (strip - S::kKStrips) * kStripKeys + row);
#pragma unroll
  for (int chunk = first; chunk < C::kDimV / 8; chunk += kThreadsOfRow) {
    cuda::copy_chunk(
        target + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kStripKeys)) + cuda::swizzled(row, chunk % 8),
        from.data + chunk * 16, from.present, from.aligned);
  }
}

}  // namespace ringattn::sm80
