// SPDX-License-Identifier: Apache-2.0
// The sum warps of the sliced kernel: the sum reducer makes the row sums of single tiles as soon as they are scored,
// and the sum adder adds them over a work tile's tiles, in order. So no CTA waits for another one's reduction.
#pragma once

#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/finish.cuh"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

// The next tile after `tile` before which rows end or begin; kNoKey if there is none. All lanes call it, for the rows
// lane / 4 and lane / 4 + 8.
__device__ __forceinline__ int next_state(const int (&begin)[2], const int (&end)[2], int tile) {
  int next = kNoKey;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (begin[half] >= end[half]) continue;
    if (begin[half] > tile) next = begin[half] < next ? begin[half] : next;
    if (end[half] > tile) next = end[half] < next ? end[half] : next;
  }
  return __reduce_min_sync(0xffffffffU, next);
}

// Whether rows of a work tile end before `tile`. All lanes call it.
__device__ __forceinline__ bool rows_end(const int (&begin)[2], const int (&end)[2], int tile) {
  const bool mine = (end[0] == tile && begin[0] < tile) || (end[1] == tile && begin[1] < tile);
  return __any_sync(0xffffffffU, mine);
}

// Makes the sums of the tiles that its CTA scores, in the order of additions of prefill's thread with the same columns,
// and sends them to all CTAs.
template <class C>
class SumReducer {
 public:
  __device__ __forceinline__ SumReducer(const ColumnSliceMap<C>& map, std::uint32_t rank)
      : map_(map), rank_(rank), lane_(thread_of_cta() % 32) {}

  __device__ __forceinline__ void process(const WorkTileInfo& info) {
    const int rows = info.get(WorkTileInfo::kRows);
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(info.get(WorkTileInfo::kEnd) - info.get(WorkTileInfo::kBegin));
    if (begin == tiles_) return;
    // The softmax_offset tile comes first, as in the scoring warps.
    const std::uint32_t softmax_offset =
        begin + static_cast<std::uint32_t>(info.get(WorkTileInfo::kOffsetTile) - info.get(WorkTileInfo::kBegin));
    if ((softmax_offset & (C::kSlices - 1U)) == rank_) reduce(softmax_offset, rows);
    for (std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U)); own < tiles_; own += C::kSlices) {
      if (own != softmax_offset) reduce(own, rows);
    }
  }

 private:
  __device__ __forceinline__ void reduce(std::uint32_t number, int rows) {
    const PipelineStateAt<C::kScoreStages> turn(number);
    const ScoreStage scores = map_.score_stage(turn.index);
    const PipelineStateAt<2> unrounded_p(reduced_++);
    barrier_wait(map_.unrounded_p_full(unrounded_p.index), unrounded_p.parity);
    bool exceeds_threshold = false;
#pragma unroll 1
    for (int row = lane_ / 4; row < kColumnSliceRows; row += 8) {
      if (row - lane_ / 4 >= rows) break;
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < C::kKeyTile / 8; ++j) {
        const float2 x = load_pair(map_.unrounded_p(unrounded_p.index, row, 8 * j + lane_ % 4 * 2));
        sum = j == 0 ? x.x : __fadd_rn(sum, x.x);
        sum = __fadd_rn(sum, x.y);
      }
      exceeds_threshold = exceeds_threshold || (row < rows && sum > kRescaleThreshold<typename C::Element>);
      cuda::store_shared(scores.sum(row, lane_ % 4), __float_as_uint(sum));
    }
    const bool fails = __any_sync(0xffffffffU, exceeds_threshold);
    if (lane_ == 0) {
      barrier_arrive(map_.unrounded_p_empty(unrounded_p.index));
      store_number(scores.flags(), fails ? ScoreStage::kFails : 0);
    }
    if constexpr (C::kSlices > 1) {
      proxy_fence();
      __syncwarp();
      send_to_others<C>(rank_, scores.flags(), ScoreStage::stats_bytes(rows), map_.sums_full(turn.index));
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.sums_full(turn.index));
  }

  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  const int lane_;
  std::uint32_t tiles_ = 0;    // tiles of all work tiles so far
  std::uint32_t reduced_ = 0;  // tiles that this CTA has reduced
};

// Adds the sums of all tiles to l, in order. Lane 4r + t has share t of rows r and r + 8.
template <class C>
class SumAdder {
 public:
  __device__ __forceinline__ SumAdder(const DecodeParams& p, const ColumnSliceMap<C>& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32) {}

  __device__ __forceinline__ void process(const WorkTileInfo& info) {
    const int tile_begin = info.get(WorkTileInfo::kBegin);
    const int tile_end = info.get(WorkTileInfo::kEnd);
    if (tile_begin == tile_end) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin_[half] = info.get(WorkTileInfo::kRowBegin, lane_ / 4 + 8 * half);
      end_[half] = info.get(WorkTileInfo::kRowEnd, lane_ / 4 + 8 * half);
      l_[half] = 0.0F;
    }
    if (C::kResumes && info.get(WorkTileInfo::kResumes) != 0)
      restore(info.work_tile(p_), info.get(WorkTileInfo::kRows));
    const std::uint32_t turn = work_tiles_++;
    barrier_wait(map_.softmax_offsets_full(turn), turn / 2 & 1U);
    flags_ = load_number(map_.offset_flags(turn));
    int next = next_state(begin_, end_, tile_begin);
#pragma unroll 1
    for (int tile = tile_begin; tile < tile_end; ++tile, ++tiles_) {
      if (tile == next) {
        if (rows_end(begin_, end_, tile)) arrive(turn);
        next = next_state(begin_, end_, tile);
      }
      const PipelineStateAt<C::kScoreStages> state(tiles_);
      const ScoreStage scores = map_.score_stage(state.index);
      barrier_wait(map_.sums_full(state.index), state.parity);
      flags_ |= load_number(scores.flags());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = load_float(scores.sum(lane_ / 4 + 8 * half, lane_ % 4));
        if (begin_[half] <= tile && tile < end_[half]) l_[half] = __fadd_rn(l_[half], sum);
      }
      __syncwarp();
      if (lane_ == 0) release_score_stage<C>(map_, tiles_);
    }
    arrive(turn);
  }

 private:
  // Starts from the shares in the rows' states.
  __device__ __forceinline__ void restore(const DecodeWorkTile& work_tile, int rows) {
    await_states();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + 8 * half;
      if (row < rows) l_[half] = __ldcg(state_stats(p_, coord_of(p_, work_tile, row)) + lane_ % 4);
    }
    __syncwarp();
  }
  // Posts the rows' offsets and sums to the output warps.
  __device__ __forceinline__ void arrive(std::uint32_t work_tile) {
    const PipelineStateAt<2> turn(ends_posted_++);
    const float sums[2] = {sum_of_quad(l_[0]), sum_of_quad(l_[1])};
    barrier_wait(map_.ends_empty(turn.index), turn.parity ^ 1U);
    if (lane_ % 4 < 2) {
      const int row = lane_ / 4 + lane_ % 4 * 8;
      const float softmax_offset = load_float(map_.softmax_offset(work_tile, row));
      cuda::store_shared(map_.row_end(turn.index, row), __float_as_uint(softmax_offset));
      cuda::store_shared(map_.row_end(turn.index, row) + 4, __float_as_uint(lane_ % 4 == 0 ? sums[0] : sums[1]));
    }
    if (lane_ == 0) store_number(map_.row_end_flags(turn.index), flags_);
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.ends_full(turn.index));
  }

  const DecodeParams& p_;
  const ColumnSliceMap<C>& map_;
  const int lane_;
  std::uint32_t work_tiles_ = 0;  // work tiles with tiles, so far
  std::uint32_t tiles_ = 0;       // tiles of all work tiles so far
  std::uint32_t ends_posted_ = 0;
  int flags_ = 0;
  int begin_[2], end_[2];
  float l_[2];
};

}  // namespace ringattn::sm90
