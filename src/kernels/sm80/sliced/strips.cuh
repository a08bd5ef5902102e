// SPDX-License-Identifier: Apache-2.0
// Strips of key tiles on their way into shared memory. A strip of K has all keys of the tile and kStripColumns columns,
// the last one of a tile maybe fewer; a strip of V has kStripKeys keys and all columns. Both take the same room, so
// they pass through the same stages: first the strips of K, then those of V.
//
// The keys and values of a tile are asked of a `Keys`: k_row(tile, row) and v_row(tile, row) say where a row lies.
// Where rows are no elements, their `Keys` has an ask_strip() and a copy_strip() of its own
// (../decode/compressed_latents.cuh).
#pragma once

#include <cstdint>

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm80/config.hpp"

namespace ringattn::sm80 {

// A row of K or V of one head.
struct FoundRow {
  const char* data;
  bool present;  // false: the sequence has no such key, and nothing is read
  bool aligned;  // to 16 bytes
};

template <class C>
struct Strips {
  static constexpr int kOfK = (C::kDim + kStripColumns - 1) / kStripColumns;
  static constexpr int kOfV = C::kKeyTile / kStripKeys;
  static constexpr int kAll = kOfK + kOfV;  // of a tile
  static constexpr int kBytes = cuda::kTileBytes<kStripKeys, C::kDimV>;

  // Columns of strip `strip` of K.
  static constexpr int columns(int strip) {
    return strip + 1 < kOfK ? kStripColumns : C::kDim - (kOfK - 1) * kStripColumns;
  }

  static_assert(cuda::kTileBytes<C::kKeyTile, kStripColumns> == kBytes);
  static_assert(C::kDim % cuda::kPanelColumns == 0 && C::kDimV % kStripColumns == 0);
};

// Called ahead of the first copy_strip(); the others follow each other strip by strip.
template <class C, class Keys>
__device__ __forceinline__ void ask_strip(const Keys&, int, int) {}

// Copies strip `strip` of the tile, all threads together. 16 neighbours copy 256 bytes of a row.
template <class C, class Keys>
__device__ __forceinline__ void copy_strip(const Keys& keys, int tile, int strip, std::uint32_t target) {
  using S = Strips<C>;
  constexpr int kThreadsOfRow = kStripColumns / 8;
  static_assert(C::kThreads == kStripKeys * kThreadsOfRow);
  const int row = static_cast<int>(threadIdx.x) / kThreadsOfRow;  // of 16
  const int first = static_cast<int>(threadIdx.x) % kThreadsOfRow;
  if (strip < S::kOfK) {
    if (first >= S::columns(strip) / 8) return;
#pragma unroll 1
    for (int i = 0; i < C::kKeyTile; i += kStripKeys) {
      const FoundRow from = keys.k_row(tile, i + row);
      cuda::copy_chunk(target + static_cast<std::uint32_t>(first / 8 * cuda::panel_bytes(C::kKeyTile)) +
                           cuda::swizzled(i + row, first % 8),
                       from.data + strip * kStripColumns * 2 + first * 16, from.present, from.aligned);
    }
    return;
  }
  const FoundRow from = keys.v_row(tile, (strip - S::kOfK) * kStripKeys + row);
#pragma unroll
  for (int chunk = first; chunk < C::kDimV / 8; chunk += kThreadsOfRow) {
    cuda::copy_chunk(
        target + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kStripKeys)) + cuda::swizzled(row, chunk % 8),
        from.data + chunk * 16, from.present, from.aligned);
  }
}

}  // namespace ringattn::sm80
