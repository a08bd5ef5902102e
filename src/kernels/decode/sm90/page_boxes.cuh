// SPDX-License-Identifier: Apache-2.0
// TMA loads of a tile from boxes that lie in one page each. One elected lane issues all of them, so that the compiler
// knows that TMA operands in uniform registers are one lane's, and makes no loop over lanes.
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

struct PageBox {
  int page;
  int row;  // row in the page; −1: the box is past the end of the sequence
};

// One lane calls it: loads a box into `target`, in panels of kTileRows rows of kRowBytes. One copy loads all kColumns,
// or one panel (kByPanel).
template <int kTileRows, int kColumns, int kRowBytes, bool kByPanel>
__device__ __forceinline__ void load_columns(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                             const PageBox& box, int head, int first_column) {
  constexpr int kColumnsOfCopy = kByPanel ? kPanelColumns : kColumns;
#pragma unroll
  for (int column = 0; column < kColumns; column += kColumnsOfCopy) {
    tma_load_page_box(target + static_cast<std::uint32_t>(column / kPanelColumns * kTileRows * kRowBytes), map, barrier,
                      first_column + column, head, box.page, box.row);
  }
}

// A warp with one elected lane calls it: loads the first `count` boxes of a tile, which lanes `first`, first + 1, …
// have looked up, from column `first_column` on. If a tile is one box, a copy loads `columns`; else the rows of the
// boxes follow each other in `target`.
template <int kTileRows, int kColumns, int kRowBytes>
__device__ __forceinline__ void tma_load_page_boxes(bool elected, std::uint32_t target, const CUtensorMap* map,
                                                    std::uint32_t barrier, int count, int box_rows, const PageBox& box,
                                                    int first, int columns, int head, int first_column = 0) {
  const auto box_of = [&box](int lane) {
    return PageBox{__shfl_sync(0xffffffffU, box.page, lane), __shfl_sync(0xffffffffU, box.row, lane)};
  };
  if (box_rows == kTileRows) {
    const PageBox whole = box_of(first);
    if (!elected) return;
    if (columns < kColumns) {
      load_columns<kTileRows, kColumns, kRowBytes, true>(target, map, barrier, whole, head, first_column);
    } else {
      load_columns<kTileRows, kColumns, kRowBytes, false>(target, map, barrier, whole, head, first_column);
    }
    return;
  }
  const auto box_bytes = static_cast<std::uint32_t>(box_rows * kRowBytes);
#pragma unroll 2
  for (int i = 0; i < count; ++i, target += box_bytes) {
    const PageBox part = box_of(first + i);
    if (elected) load_columns<kTileRows, kColumns, kRowBytes, true>(target, map, barrier, part, head, first_column);
  }
}

}  // namespace ringattn::sm90
