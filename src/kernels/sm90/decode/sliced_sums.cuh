// SPDX-License-Identifier: Apache-2.0
// The warp of the sliced kernel that adds probabilities up. Of the tiles that its CTA scores it makes the sums, each in
// the order of the fold's thread that has these columns, and tells the other CTAs; of all tiles, in order, it adds them
// to l. Lane 4r + t has share t of rows r and r + 8.
#pragma once

#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

// Whether rows of a unit end in front of `tile`. `row`: of the lane, and 8 behind; every lane of the warp asks.
__device__ __forceinline__ bool rows_end(const int (&begin)[2], const int (&end)[2], int tile) {
  const bool mine = (end[0] == tile && begin[0] < tile) || (end[1] == tile && begin[1] < tile);
  return __any_sync(0xffffffffU, mine);
}

template <class C>
class SlicedSums {
 public:
  __device__ __forceinline__ SlicedSums(const SlicedMap<C>& map, std::uint32_t rank)
      : map_(map), rank_(rank), lane_(thread_of_cta() % 32) {}

  __device__ __forceinline__ void take(const UnitNote& note) {
    const int unit_begin = note.get(UnitNote::kBegin);
    const int unit_end = note.get(UnitNote::kEnd);
    if (unit_begin == unit_end) return;
    const int rows = note.get(UnitNote::kRows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin_[half] = note.get(UnitNote::kRowBegin, lane_ / 4 + 8 * half);
      end_[half] = note.get(UnitNote::kRowEnd, lane_ / 4 + 8 * half);
      l_[half] = 0.0F;
    }
    const std::uint32_t turn = units_++;
    barrier_wait(map_.references_full(turn), turn / 2 & 1U);
    flags_ = load_number(map_.reference_flags(turn));
    for (int tile = unit_begin; tile < unit_end; ++tile, ++tiles_) {
      if (tile > unit_begin && rows_end(begin_, end_, tile)) tell(turn);
      float sums[2];
      if ((tiles_ & (C::kSlices - 1U)) == rank_) {
        make(sums, rows);
      } else {
        hear(sums);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (begin_[half] <= tile && tile < end_[half]) l_[half] = __fadd_rn(l_[half], sums[half]);
      }
    }
    tell(turn);
  }

 private:
  // The sums of a tile that this CTA has scored.
  __device__ __forceinline__ void make(float (&sums)[2], int rows) {
    const Turn<C::kSlots> turn(tiles_);
    const ScoreSlot slot = map_.slot(turn.place);
    const Turn<2> weights(made_++);
    barrier_wait(map_.weights_full(weights.place), weights.parity);
    bool outgrown = false;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + 8 * half;
      if (8 * half >= rows) break;
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < C::kKeyTile / 8; ++j) {
        const float2 x = load_pair(map_.weights(weights.place, row, 8 * j + lane_ % 4 * 2));
        sum = j == 0 ? x.x : __fadd_rn(sum, x.x);
        sum = __fadd_rn(sum, x.y);
      }
      if (half == 0) {
        sums[0] = sum;
      } else {
        sums[1] = sum;
      }
      outgrown = outgrown || (row < rows && sum > kOutgrown<typename C::Element>);
      if constexpr (C::kSlices > 1) cuda::store_shared(slot.sum(row, lane_ % 4), __float_as_uint(sum));
    }
    if (__any_sync(0xffffffffU, outgrown)) flags_ |= ScoreSlot::kFails;
    if (lane_ == 0) {
      barrier_arrive(map_.weights_empty(weights.place));
      barrier_arrive(map_.slot_empty(turn.place));
    }
    if constexpr (C::kSlices > 1) {
      if (lane_ == 0) store_number(slot.flags(), flags_);
      proxy_fence();
      __syncwarp();
      send_to_others<C>(rank_, slot.flags(), ScoreSlot::number_bytes(rows), map_.sums_full(turn.place));
    }
  }

  // The sums of a tile that another CTA has scored.
  __device__ __forceinline__ void hear(float (&sums)[2]) {
    const Turn<C::kSlots> turn(tiles_);
    const ScoreSlot slot = map_.slot(turn.place);
    barrier_wait(map_.sums_full(turn.place), turn.parity);
    flags_ |= load_number(slot.flags());
    sums[0] = load_float(slot.sum(lane_ / 4, lane_ % 4));
    sums[1] = load_float(slot.sum(lane_ / 4 + 8, lane_ % 4));
    __syncwarp();
    if (lane_ == 0) barrier_arrive_at(in_cta(map_.slot_empty(turn.place), tiles_ & (C::kSlices - 1U)));
  }

  // What the rows have so far, to those that hold outputs.
  __device__ __forceinline__ void tell(std::uint32_t unit_turn) {
    const Turn<2> turn(told_++);
    const float sums[2] = {sum_of_quad(l_[0]), sum_of_quad(l_[1])};
    barrier_wait(map_.ends_empty(turn.place), turn.parity ^ 1U);
    if (lane_ % 4 < 2) {
      const int row = lane_ / 4 + lane_ % 4 * 8;
      const float reference = load_float(map_.reference(unit_turn, row));
      cuda::store_shared(map_.row_end(turn.place, row), __float_as_uint(reference));
      cuda::store_shared(map_.row_end(turn.place, row) + 4, __float_as_uint(lane_ % 4 == 0 ? sums[0] : sums[1]));
    }
    if (lane_ == 0) store_number(map_.row_end_flags(turn.place), flags_);
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.ends_full(turn.place));
  }

  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  const int lane_;
  std::uint32_t units_ = 0;  // so far, but for those without tiles
  std::uint32_t tiles_ = 0;  // of all of them
  std::uint32_t made_ = 0;   // tiles that this CTA has scored
  std::uint32_t told_ = 0;
  int flags_ = 0;
  int begin_[2], end_[2];
  float l_[2];
};

}  // namespace ringattn::sm90
