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

  // Writes a note of a unit for the other warps, and fetches its tiles.
  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    sequence_ = unit.sequence;
    kv_head_ = unit.kv_head;
    length_ = unit.of.length;
    end_ = unit.end;
    lag_ = unit.lag;
    const int reference = write_note(unit);
    if (unit.begin == unit.end) return;
    const std::uint32_t begin = tiles_;
    const std::uint32_t end = begin + static_cast<std::uint32_t>(unit.end - unit.begin);
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));  // this CTA scores own, own + kSlices, …
    const auto tile_at = [&](std::uint32_t number) { return unit.begin + static_cast<int>(number - begin); };
    Box ahead_k = find(reference, lane_ < p_.boxes);
    Box ahead = find(unit.begin + nth_, nth_ < batch_);
    Box box = ahead;
    int nth = batch_;
    int tile_k = reference;
#pragma unroll 1
    while (tiles_ < end) {
      // K as soon as this CTA's next tile is due, the reference tile ahead of all.
      if (tile_k == reference || (own < end && (tiles_ & ~(C::kSlices - 1U)) == (own & ~(C::kSlices - 1U)))) {
        const Box box_k = ahead_k;
        const int tile = tile_k;
        if (tile != reference) own += C::kSlices;
        if (own < end && tile_at(own) == reference) own += C::kSlices;
        tile_k = tile_at(own);
        ahead_k = find(tile_k, lane_ < p_.boxes && own < end);
        fetch_k(tile, box_k);
        if (tile == reference) continue;
      }
      const int tile = tile_at(tiles_);
      if (nth == batch_) {
        box = ahead;
        ahead = find(tile + batch_ + nth_, nth_ < batch_);
        nth = 0;
      }
      fetch_v(tile, box, nth_ == nth);
      ++nth;
      ++tiles_;
    }
  }

  // There are no more units.
  __device__ __forceinline__ void tell_end() {
    const Turn<2> turn(notes_++);
    barrier_wait(map_.note_empty(turn.place), turn.parity ^ 1U);
    if (lane_ != 0) return;
    store_number(map_.note(turn.place).at(UnitNote::kBegin), UnitNote::kNoMore);
    barrier_arrive(map_.note_full(turn.place));
  }

 private:
  struct Box {
    int page;
    int row;  // in the page; −1: no key of the sequence lies there
  };

  // Returns the unit's reference tile: the first in which a row that folds the unit sees a key. Rows for which it is
  // another one make the unit fail.
  __device__ __forceinline__ int write_note(const DecodeUnit& unit) {
    const Turn<2> turn(notes_++);
    const UnitNote note = map_.note(turn.place);
    const int rows = rows_of(p_, unit);
    RowReach reach{kNoKey, 0, unit.end, unit.end};
    if (lane_ < rows) reach = reach_of<C>(p_, unit, place_of(p_, unit, lane_));
    const bool folds = reach.begin < reach.end;
    int own = reach.low / C::kKeyTile;
    own = own > unit.begin ? own : unit.begin;
    const std::uint32_t folding = __ballot_sync(0xffffffffU, folds);
    const int first = __shfl_sync(0xffffffffU, own, folding == 0 ? 0 : __ffs(static_cast<int>(folding)) - 1);
    const bool inside = folding != 0 && first < unit.end;
    const int reference = inside ? first : unit.begin;
    const bool fails = __any_sync(0xffffffffU, folds && own != reference);
    const int common_begin = __reduce_max_sync(0xffffffffU, lane_ < rows ? reach.low : 0);
    const int common_end = __reduce_min_sync(0xffffffffU, lane_ < rows ? reach.high : kNoKey);
    barrier_wait(map_.note_empty(turn.place), turn.parity ^ 1U);
    const auto put = [&note](UnitNote::Field field, int number) { store_number(note.at(field), number); };
    if (lane_ < kSlicedRows) {
      store_number(note.at(UnitNote::kLow, lane_), reach.low);
      store_number(note.at(UnitNote::kHigh, lane_), reach.high);
      store_number(note.at(UnitNote::kRowBegin, lane_), reach.begin);
      store_number(note.at(UnitNote::kRowEnd, lane_), reach.end);
    }
    if (lane_ == 0) {
      put(UnitNote::kBegin, unit.begin);
      put(UnitNote::kEnd, unit.end);
      put(UnitNote::kLength, unit.of.length);
      put(UnitNote::kPosition, unit.of.position);
      put(UnitNote::kBeginGroup, unit.of.begin_group);
      put(UnitNote::kGroups, unit.of.groups);
      put(UnitNote::kSequence, unit.sequence);
      put(UnitNote::kKvHead, unit.kv_head);
      put(UnitNote::kBlock, unit.block);
      put(UnitNote::kNumber, unit.number);
      put(UnitNote::kCacheGroup, unit.cache_group);
      put(UnitNote::kFirstNumber, unit.first_number);
      put(UnitNote::kRows, rows);
      put(UnitNote::kReference, reference);
      put(UnitNote::kFails, fails ? 1 : 0);
      put(UnitNote::kCommonBegin, common_begin);
      put(UnitNote::kCommonEnd, common_end);
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.note_full(turn.place));
    return reference;
  }

  __device__ __forceinline__ Box find(int tile, bool wanted) const {
    const int key = tile * C::kKeyTile + row_;
    if (!wanted || tile >= end_ || key >= length_) return {0, -1};
    const int here = key - lag_;
    if (p_.pages == nullptr) return {sequence_, here};
    const int page = __ldg(p_.pages + sequence_ * p_.table_stride + (here >> p_.page_log));
    return {page, here & ((1 << p_.page_log) - 1)};
  }
  // Rows of the tile that boxes bring.
  __device__ __forceinline__ int rows_in_boxes(int tile) const {
    const int left = length_ - tile * C::kKeyTile;
    const int keys = left < C::kKeyTile ? left : C::kKeyTile;
    return (keys + p_.box_rows - 1) / p_.box_rows * p_.box_rows;
  }

  __device__ __forceinline__ void fetch_k(int tile, const Box& box) {
    const Turn<C::kKStages> turn(ks_++);
    barrier_wait(map_.k_empty(turn.place), turn.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(map_.k_full(turn.place), rows_in_boxes(tile) * (C::kKBytes / C::kKeyTile));
    }
    __syncwarp();
    if (box.row < 0) return;
    for (int column = 0; column < C::kDim; column += p_.k_box_columns) {
      load_page_box(
          map_.k(turn.place) + static_cast<std::uint32_t>(column / kPanelColumns * cuda::panel_bytes(C::kKeyTile) +
                                                          row_ * kPanelRowBytes),
          &p_.k, map_.k_full(turn.place), column, kv_head_, box.page, box.row);
    }
  }
  // `mine`: this lane's box is one of the tile's.
  __device__ __forceinline__ void fetch_v(int tile, const Box& box, bool mine) {
    const Turn<C::kVStages> turn(tiles_);
    barrier_wait(map_.v_empty(turn.place), turn.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(map_.v_full(turn.place), rows_in_boxes(tile) * (C::kVBytes / C::kKeyTile));
    }
    __syncwarp();
    if (!mine || box.row < 0) return;
    for (int column = 0; column < C::kSliceColumns; column += p_.slice_box_columns) {
      load_page_box(
          map_.v(turn.place) + static_cast<std::uint32_t>(column / kPanelColumns * cuda::panel_bytes(C::kKeyTile) +
                                                          row_ * C::kVRowBytes),
          &p_.v_slices, map_.v_full(turn.place), static_cast<int>(rank_) * C::kSliceColumns + column, kv_head_,
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
  std::uint32_t notes_ = 0;  // so far
  std::uint32_t tiles_ = 0;
  std::uint32_t ks_ = 0;  // K tiles
  // Of the unit.
  int sequence_ = 0, kv_head_ = 0, length_ = 0, end_ = 0, lag_ = 0;
};

}  // namespace ringattn::sm90
