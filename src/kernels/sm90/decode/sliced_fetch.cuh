// SPDX-License-Identifier: Apache-2.0
// The warp of the sliced kernel that fetches: K of the tiles that its CTA scores, and its CTA's columns of every V.
#pragma once

#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class SlicedFetcher {
 public:
  __device__ __forceinline__ SlicedFetcher(const DecodeParams& p, const SlicedMap<C>& map, std::uint32_t rank)
      : p_(p), map_(map), rank_(rank), lane_(thread_of_cta() % 32), batch_(32 / p.boxes), nth_(lane_ / p.boxes) {
    row_ = (lane_ - nth_ * p.boxes) * p.box_rows;
  }

  __device__ __forceinline__ void fetch(const DecodeUnit& unit) {
    const int reference = reference_tile<C>(p_, unit);
    const std::uint32_t begin = tiles_;
    const std::uint32_t end = begin + static_cast<std::uint32_t>(unit.end - unit.begin);
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));  // this CTA scores own, own + kSlices, …
    const auto tile_at = [&](std::uint32_t number) { return unit.begin + static_cast<int>(number - begin); };
    fetch_k(unit, reference, find(unit, reference, lane_ < p_.boxes));
    Box ahead_k = find(unit, tile_at(own), lane_ < p_.boxes && own < end);
    Box ahead = find(unit, unit.begin + nth_, nth_ < batch_);
    Box box = ahead;
    int nth = batch_;
    for (; tiles_ < end; ++tiles_) {
      if (own < end && (tiles_ & ~(C::kSlices - 1U)) == (own & ~(C::kSlices - 1U))) {
        const Box box_k = ahead_k;
        const int tile = tile_at(own);
        own += C::kSlices;
        ahead_k = find(unit, tile_at(own), lane_ < p_.boxes && own < end);
        if (tile != reference) fetch_k(unit, tile, box_k);
      }
      const int tile = tile_at(tiles_);
      if (nth == batch_) {
        box = ahead;
        ahead = find(unit, tile + batch_ + nth_, nth_ < batch_);
        nth = 0;
      }
      fetch_v(unit, tile, box, nth_ == nth);
      ++nth;
    }
  }

 private:
  struct Box {
    int page;
    int row;  // in the page; −1: no key of the sequence lies there
  };

  __device__ __forceinline__ Box find(const DecodeUnit& unit, int tile, bool wanted) const {
    const int key = tile * C::kKeyTile + row_;
    if (!wanted || tile >= unit.end || key >= unit.of.length) return {0, -1};
    if (p_.pages == nullptr) return {unit.sequence, key};
    const int page = __ldg(p_.pages + unit.sequence * p_.table_stride + (key >> p_.page_log));
    return {page, key & ((1 << p_.page_log) - 1)};
  }
  // Rows of the tile that boxes bring.
  __device__ __forceinline__ int rows_in_boxes(const DecodeUnit& unit, int tile) const {
    const int left = unit.of.length - tile * C::kKeyTile;
    const int keys = left < C::kKeyTile ? left : C::kKeyTile;
    return (keys + p_.box_rows - 1) / p_.box_rows * p_.box_rows;
  }

  __device__ __forceinline__ void fetch_k(const DecodeUnit& unit, int tile, const Box& box) {
    const Turn<C::kKStages> turn(ks_++);
    barrier_wait(map_.k_empty(turn.place), turn.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(map_.k_full(turn.place), rows_in_boxes(unit, tile) * (C::kKBytes / C::kKeyTile));
    }
    __syncwarp();
    if (box.row < 0) return;
    for (int column = 0; column < C::kDim; column += p_.k_box_columns) {
      load_page_box(
          map_.k(turn.place) + static_cast<std::uint32_t>(column / kPanelColumns * cuda::panel_bytes(C::kKeyTile) +
                                                          row_ * kPanelRowBytes),
          &p_.k, map_.k_full(turn.place), column, unit.kv_head, box.page, box.row);
    }
  }
  // `mine`: this lane's box is one of the tile's.
  __device__ __forceinline__ void fetch_v(const DecodeUnit& unit, int tile, const Box& box, bool mine) {
    const Turn<C::kVStages> turn(tiles_);
    barrier_wait(map_.v_empty(turn.place), turn.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(map_.v_full(turn.place), rows_in_boxes(unit, tile) * (C::kVBytes / C::kKeyTile));
    }
    __syncwarp();
    if (!mine || box.row < 0) return;
    for (int column = 0; column < C::kSliceColumns; column += p_.slice_box_columns) {
      load_page_box(
          map_.v(turn.place) + static_cast<std::uint32_t>(column / kPanelColumns * cuda::panel_bytes(C::kKeyTile) +
                                                          row_ * C::kVRowBytes),
          &p_.v_slices, map_.v_full(turn.place), static_cast<int>(rank_) * C::kSliceColumns + column, unit.kv_head,
          box.page, box.row);
    }
  }

  const DecodeParams& p_;
  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  const int lane_;
  const int batch_;          // tiles whose boxes the lanes look up at a time
  const int nth_;            // which of those is this lane's
  int row_;                  // where in its tile this lane's box begins
  std::uint32_t tiles_ = 0;  // so far
  std::uint32_t ks_ = 0;     // K tiles so far
};

}  // namespace ringattn::sm90
