// SPDX-License-Identifier: Apache-2.0
// The output warps of the sliced kernel, each with some columns of its CTA's slice. They add P V of the tiles in order,
// whichever CTA has scored them.
#pragma once

#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"

namespace ringattn::sm90 {

// The sum warps of the sliced kernel: the sum reducer makes the row sums of single tiles as soon as they are scored,
// and the sum adder adds them over a work tile's tiles, in order. So no CTA waits for another one's reduction.

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
  __device__ __forceinline__ SumAdder(const typename C::Params& p, const ColumnSliceMap<C>& map)
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
    if constexpr (HasPrefixes<typename C::Params>) {
      if (info.get(WorkTileInfo::kResumes) != 0) restore(info.work_tile(p_), info.get(WorkTileInfo::kRows));
    }
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

  const typename C::Params& p_;
  const ColumnSliceMap<C>& map_;
  const int lane_;
  std::uint32_t work_tiles_ = 0;  // work tiles with tiles, so far
  std::uint32_t tiles_ = 0;       // tiles of all work tiles so far
  std::uint32_t ends_posted_ = 0;
  int flags_ = 0;
  int begin_[2], end_[2];
  float l_[2];
};

// Layout of a V tile in the sliced kernel, and zeroing of the rows past the end of a sequence.

// Offset in a V tile of 8 columns of a row.
template <class C>
__device__ __forceinline__ std::uint32_t value_chunk(int row, int chunk) {
  return tile_chunk<C::kKeyTile, C::kVRowBytes>(row, chunk);
}

// As Decoder::clear_tail(), for one warp: zeroes kChunks · 8 columns of the rows after `keys` of the tile at `v`.
template <class C, int kChunks>
__device__ __forceinline__ void clear_value_tail(std::uint32_t v, int first_chunk, int keys, int lane) {
#pragma unroll 1
  for (int row = keys + lane; row < C::kKeyTile; row += 32) {
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      cuda::store_shared(v + value_chunk<C>(row, first_chunk + n), uint4{0, 0, 0, 0});
    }
  }
  proxy_fence();  // orders the writes before a later TMA load; lanes that copy values need none
  __syncwarp();
}

// Blocks of 8 columns of an output warp.
template <class C>
inline constexpr int kOutBlocks = C::kSliceColumns / 8 / C::kOutWarps;

// V tiles of 16-bit elements in TMA's layout: this warp's columns of its CTA's slice, in consecutive blocks.
template <class C>
class TileValues {
 public:
  // B fragments of 16 keys.
  struct Fragment {
    std::uint32_t v[kOutBlocks<C>][2];
  };

  __device__ __forceinline__ explicit TileValues(const ColumnSliceMap<C>& map)
      : map_(map), warp_(thread_of_cta() / 32 - C::kScoreWarps), lane_(thread_of_cta() % 32) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const bool pair = 2 * n + 1 < kBlocks;
      v_at_[n] = value_chunk<C>(lane_ % 16, warp_ * kBlocks + 2 * n + (pair ? lane_ / 16 : 0));
    }
  }

  // Whether the next tile has landed, without waiting.
  __device__ __forceinline__ bool landed() const { return barrier_ended(map_.v_full(stage_.index), stage_.parity); }
  // Waits for the next tile, which has `keys` keys.
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.v_full(stage_.index), stage_.parity);
    if (keys < C::kKeyTile) clear_value_tail<C, kBlocks>(map_.v(stage_.index), warp_ * kBlocks, keys, lane_);
  }
  // Makes it the tile that is read from. Without a next tile, the current one stays.
  __device__ __forceinline__ void acquire(bool is_next) {
    if (!is_next) return;
    tile_ = map_.v(stage_.index);
    stage_.advance();
  }
  // Only constants of the instructions differ from step to step, so no address is computed between mma.
  __device__ __forceinline__ void fetch(Fragment& to, int step) const {
    const auto rows = static_cast<std::uint32_t>(step * 16 * C::kVRowBytes);
#pragma unroll
    for (int n = 0; n + 1 < kBlocks; n += 2) {
      std::uint32_t both[4];
      cuda::load_matrix_transposed(both, tile_ + v_at_[n / 2] + rows);
      to.v[n][0] = both[0];
      to.v[n][1] = both[1];
      to.v[n + 1][0] = both[2];
      to.v[n + 1][1] = both[3];
    }
    if constexpr (kBlocks % 2 != 0) {
      cuda::load_matrix_pair_transposed(to.v[kBlocks - 1], tile_ + v_at_[kLoads - 1] + rows);
    }
  }
  // The barrier at which a warp arrives when it has finished reading the tile before the current one.
  __device__ __forceinline__ std::uint32_t next_released() {
    const std::uint32_t barrier = map_.v_empty(released_.index);
    released_.advance();
    return barrier;
  }

  // Calls with(column, x, y) for this thread's adjacent outputs in the row of `half`. Columns count within the slice.
  template <class Outputs, class With>
  __device__ __forceinline__ void for_columns(Outputs& o, int half, const With& with) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      with((warp_ * kBlocks + n) * 8 + lane_ % 4 * 2, o[n][2 * half], o[n][2 * half + 1]);
    }
  }

 private:
  static constexpr int kBlocks = kOutBlocks<C>;
  static constexpr int kLoads = (kBlocks + 1) / 2;  // ldmatrix for the mma of 16 keys

  const ColumnSliceMap<C>& map_;
  const int warp_;
  const int lane_;
  PipelineState<C::kVStages> stage_, released_;  // the next tile to wait for, and the next to release
  std::uint32_t tile_ = 0;
  std::uint32_t v_at_[kLoads];  // offset of this lane's share
};

// Query rows are the M of the mma, and columns of V the N. ColumnOutputs (column_outputs.cuh) swaps them.
template <class C>
class RowOutputs {
 public:
  __device__ __forceinline__ RowOutputs(const typename C::Params& p, const ColumnSliceMap<C>& map, std::uint32_t rank)
      : p_(p),
        map_(map),
        rank_(rank),
        warp_(thread_of_cta() / 32 - C::kScoreWarps),
        lane_(thread_of_cta() % 32),
        values_(map) {
    p_at_ = ScoreStage::block<C::kScoreBlocks>(0, lane_ / 8 % 2) + ScoreStage::chunk(lane_ % 8, lane_ / 16);
  }

  // Whether this thread reports a failed work tile.
  __device__ bool is_leader() const { return warp_ == 0 && lane_ == 0; }

  // Returns whether the work tile has failed and must be recomputed tile by tile.
  __device__ __forceinline__ bool process(const WorkTileInfo& info) {
    const DecodeWorkTile work_tile = info.work_tile(p_);
    rows_count_ = info.get(WorkTileInfo::kRows);
    flags_ = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = lane_ / 4 + 8 * half;
      begin_[half] = info.get(WorkTileInfo::kRowBegin, tile_row);
      end_[half] = info.get(WorkTileInfo::kRowEnd, tile_row);
      clear_row(half);
    }
    if (work_tile.resumes) restore(work_tile);
    if (work_tile.begin < work_tile.end) {
      await_next(false, work_tile.seq_info.length - work_tile.begin * C::kKeyTile);
      values_.acquire(true);
      fetch(head_[0], probabilities(score_state_), 0);
      fetch(head_[1], probabilities(score_state_), 1);
    }
    int next = next_state(begin_, end_, work_tile.begin);
#pragma unroll 1
    for (int tile = work_tile.begin; tile < work_tile.end;) {
      if (tile == next) {
        start_rows(work_tile, tile);
        next = next_state(begin_, end_, tile);
      }
      const int stop = next < work_tile.end ? next : work_tile.end;
      add_tiles(work_tile, tile, stop);
      tile = stop;
    }
    if (work_tile.begin < work_tile.end) {
      store_rows(work_tile, work_tile.end);
    } else if (finishes(p_, work_tile)) {
      store_empty_rows(work_tile);
    }
    __syncwarp();
    if ((flags_ & ScoreStage::kFails) != 0) return true;
    if (!finishes(p_, work_tile) && p_.partials.data == nullptr) {
      merge_if_last<C, 32 * C::kOutWarps>(p_, work_tile, thread_of_cta() - 32 * C::kScoreWarps,
                                          static_cast<int>(rank_));
      __syncwarp();
    }
    return false;
  }

 private:
  static constexpr int kBlocks = kOutBlocks<C>;
  static constexpr int kSteps = C::kKeyTile / 16;
  static_assert(kSteps >= 4);

  // Fragments of the mma of 16 keys.
  struct Fragments {
    std::uint32_t p[4];
    typename TileValues<C>::Fragment v;
  };

  // Whether the next tile and its probabilities are ready, without waiting.
  __device__ __forceinline__ bool next_is_ready() const {
    const bool scored = barrier_ended(map_.score_full(score_state_.index), score_state_.parity);
    return values_.landed() && scored;
  }
  // Waits for both, unless `ready`. The tile has `keys` keys.
  __device__ __forceinline__ void await_next(bool ready, int keys) const {
    if (ready && keys >= C::kKeyTile) return;
    barrier_wait(map_.score_full(score_state_.index), score_state_.parity);
    values_.await(keys);
  }

  // Address of this lane's share of a score stage's probabilities.
  __device__ __forceinline__ std::uint32_t probabilities(const PipelineState<C::kScoreStages>& state) const {
    return map_.score_stage(state.index).address + p_at_;
  }

  __device__ __forceinline__ void fetch(Fragments& to, std::uint32_t p, int step) const {
    cuda::load_matrix(to.p, p + ScoreStage::block<C::kScoreBlocks>(step, 0));
    values_.fetch(to.v, step);
  }

  // Adds P V of tiles [tile, stop) of a work tile. The first two k16 steps of the first one have been loaded.
  __device__ __forceinline__ void add_tiles(const DecodeWorkTile& work_tile, int tile, int stop) {
#pragma unroll 1
    for (; tile < stop; ++tile) {
      const bool is_next = tile + 1 < work_tile.end;
      const int keys = is_next ? work_tile.seq_info.length - (tile + 1) * C::kKeyTile : C::kKeyTile;
      add_outputs(is_next, keys);
      __syncwarp();
      const std::uint32_t released = values_.next_released();
      if (lane_ == 0) {
        barrier_arrive(released);
        release_score_stage<C>(map_, tiles_);
      }
      ++tiles_;
    }
  }

  // Adds P V of a tile whose first two k16 steps have been loaded. The next tile's are loaded meanwhile, so that the
  // mma chain never waits. Its barriers are tested well before that. It has `keys` keys.
  __device__ __forceinline__ void add_outputs(bool is_next, int keys) {
    const std::uint32_t p = probabilities(score_state_);
    score_state_.advance();
    Fragments ring[3];
    // without a next tile the loaded fragments are not used
    const std::uint32_t next_p = is_next ? probabilities(score_state_) : p;
    bool ready = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Fragments& now = step < 2 ? head_[step] : ring[step % 3];
      if (step == kSteps / 2 - 1) ready = next_is_ready() || !is_next;
      if (step + 2 < kSteps) fetch(ring[(step + 2) % 3], p, step + 2);
      multiply(now);
      if (step + 3 == kSteps) {  // all of this tile has been loaded
        await_next(ready, keys);
        values_.acquire(is_next);
      }
      if (step + 2 >= kSteps) fetch(head_[step + 2 - kSteps], next_p, step + 2 - kSteps);
    }
  }
  __device__ __forceinline__ void multiply(const Fragments& now) {
    const auto& [v] = now.v;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      cuda::MmaTraits<typename C::Element>::mma(o_[n], now.p, v[n][0], v[n][1], o_[n]);
    }
  }

  // As Decoder::start_rows() and store_rows().
  __device__ __forceinline__ void start_rows(const DecodeWorkTile& work_tile, int tile) {
    if (rows_end(begin_, end_, tile)) store_rows(work_tile, tile);
    const bool begins = begin_[0] == tile || begin_[1] == tile;
    if (!__any_sync(0xffffffffU, begins)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (begin_[half] == tile) clear_row(half);
    }
    __syncwarp();
  }
  // Stores the rows that end before `tile`, with offsets and sums from the sum adder.
  __device__ __forceinline__ void store_rows(const DecodeWorkTile& work_tile, int tile) {
    const PipelineStateAt<2> turn(ends_++);
    barrier_wait(map_.ends_full(turn.index), turn.parity);
    flags_ |= load_number(map_.row_end_flags(turn.index));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = lane_ / 4 + 8 * half;
      if (end_[half] != tile || tile_row >= rows_count_) continue;
      if (begin_[half] < end_[half]) {
        store_row(work_tile, half, load_pair(map_.row_end(turn.index, tile_row)));
      } else if (finishes(p_, work_tile)) {
        clear_row(half);
        store_row(work_tile, half, float2{-INFINITY, 0.0F});
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.ends_empty(turn.index));
  }
  __device__ __forceinline__ void store_empty_rows(const DecodeWorkTile& work_tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane_ / 4 + 8 * half < rows_count_) store_row(work_tile, half, float2{-INFINITY, 0.0F});
    }
  }
  // `stats`: the row's softmax_offset and sum.
  __device__ __forceinline__ void store_row(const DecodeWorkTile& work_tile, int half, float2 stats) const {
    const int tile_row = lane_ / 4 + 8 * half;
    const int first = static_cast<int>(rank_) * C::kSliceColumns;  // this CTA's first output column
    const bool is_leader = warp_ == 0 && lane_ % 4 == 0;
    const DecodeCoord coord = coord_of(p_, work_tile, tile_row);
    if (!finishes(p_, work_tile)) {
      float* const outputs = partial_outputs<C>(p_, work_tile, tile_row, coord);
      const auto store = [&](int column, float x, float y) {
        __stcg(reinterpret_cast<float2*>(outputs + cuda::fragment_offset(first + column)), float2{x, y});
      };
      values_.for_columns(o_, half, store);
      const int slice = static_cast<int>(rank_);
      if (is_leader) store_stats(p_, work_tile, slice, slice + 1, tile_row, coord, stats);
      return;
    }
    const FinishedRow<C> finished(p_.attention, coord, stats.x, stats.y);
    values_.for_columns(o_, half, [&](int column, float x, float y) { finished.write(first + column, x, y); });
    if (first == 0 && is_leader) finished.write_lse();
  }
  // Starts from the acc in the rows' states instead of zero.
  __device__ __forceinline__ void restore(const DecodeWorkTile& work_tile) {
    await_states();
    const int first = static_cast<int>(rank_) * C::kSliceColumns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = lane_ / 4 + 8 * half;
      if (tile_row >= rows_count_) continue;
      const float* const state = state_of(p_, coord_of(p_, work_tile, tile_row));
      values_.for_columns(o_, half, [&](int column, float& x, float& y) {
        const auto two = __ldcg(reinterpret_cast<const float2*>(state + cuda::fragment_offset(first + column)));
        x = two.x;
        y = two.y;
      });
    }
    __syncwarp();
  }
  __device__ __forceinline__ void clear_row(int half) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      o_[n][2 * half] = 0.0F;
      o_[n][2 * half + 1] = 0.0F;
    }
  }

  const typename C::Params& p_;
  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  const int warp_;
  const int lane_;
  std::uint32_t tiles_ = 0;                     // tiles of all work tiles so far
  PipelineState<C::kScoreStages> score_state_;  // score stage of the next tile
  std::uint32_t p_at_;                          // offset of this lane's share
  std::uint32_t ends_ = 0;                      // row ends received from the sum adder
  int flags_ = 0;
  int rows_count_ = 0;
  int begin_[2], end_[2];  // the tiles of this thread's rows in the work tile
  Fragments head_[2];
  float o_[kBlocks][4];
  TileValues<C> values_;
};

}  // namespace ringattn::sm90
