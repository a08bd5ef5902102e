// SPDX-License-Identifier: Apache-2.0
// The output warps of the sliced kernel with operands swapped: columns of V are the M of the mma and query rows the N,
// eight at a time. So the few query rows of a typical step fill the mma, and less is read from shared memory. Each
// output is the same chain of additions. P V of the tiles is added in order, whichever CTA has scored them.
#pragma once

#include <type_traits>

#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"
#include "kernels/decode/sm90/sliced_outputs.cuh"

namespace ringattn::sm90 {

// V of a 16-bit cache as operand A of ColumnOutputs (column_outputs.cuh).

// V tiles of 16-bit elements in TMA's layout, for a warp with outputs: it has some of its CTA's columns, in blocks of
// 16, the M of its mma.
template <class C>
class TileColumns {
 private:
  static constexpr int kColumnBlocks = C::kSliceColumns / 16;

 public:
  // warps that share the same columns: 8 query rows each
  static constexpr int kSharing = kColumnBlocks < C::kOutWarps ? 2 : 1;
  static constexpr int kColumnWarps = C::kOutWarps / kSharing;
  static constexpr int kBlocks = kColumnBlocks / kColumnWarps;  // column blocks of a warp
  static constexpr int kAhead = kBlocks == 1 ? 4 : 2;           // k16 steps that are loaded before their mma
  static constexpr bool kScoresAhead = true;                    // the next tile has been scored when a tile's mma begin
  static_assert(kBlocks * kColumnWarps == kColumnBlocks);

  // A fragments of 16 keys.
  struct Fragment {
    std::uint32_t v[kBlocks][4];
  };

  __device__ __forceinline__ explicit TileColumns(const ColumnSliceMap<C>& map)
      : map_(map),
        lane_(thread_of_cta() % 32),
        first_column_((thread_of_cta() / 32 - C::kScoreWarps) % kColumnWarps * kBlocks * 16) {
    const int row = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) v_at_[n] = value_chunk<C>(row, first_column_ / 8 + 2 * n + lane_ / 8 % 2);
  }

  __device__ __forceinline__ void begin(const WorkTileInfo&) {}

  // Whether the next tile has landed, without waiting.
  __device__ __forceinline__ bool landed() const { return barrier_ended(map_.v_full(stage_.index), stage_.parity); }
  // Waits for the next tile, which has `keys` keys.
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.v_full(stage_.index), stage_.parity);
    if (keys < C::kKeyTile) clear_value_tail<C, 2 * kBlocks>(map_.v(stage_.index), first_column_ / 8, keys, lane_);
  }
  // Makes it the tile that is read from.
  __device__ __forceinline__ void acquire(int) {
    v_tile_ = map_.v(stage_.index);
    stage_.advance();
  }
  // Skips the next tile.
  __device__ __forceinline__ void skip() {
    stage_.advance();
    released_.advance();
  }
  // The barrier at which a warp arrives when it has finished reading the tile before the current one.
  __device__ __forceinline__ std::uint32_t next_released() {
    const std::uint32_t barrier = map_.v_empty(released_.index);
    released_.advance();
    return barrier;
  }

  // Calls with(path): how tiles are loaded and converted.
  template <class With>
  __device__ __forceinline__ static void choose_path(const With& with) {
    with(0);
  }
  // Whether `path` is also the path of the current tile. If not, unusual(path) is.
  __device__ __forceinline__ static constexpr bool is_usual(int) { return true; }
  __device__ __forceinline__ static constexpr int unusual(int path) { return path; }
  // Only constants of the instructions differ from step to step.
  __device__ __forceinline__ void fetch(int, Fragment& to, int step) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      cuda::load_matrix_transposed(to.v[n], v_tile_ + v_at_[n] + static_cast<std::uint32_t>(step * 16 * C::kVRowBytes));
    }
  }
  __device__ __forceinline__ static const Fragment& elements(int, const Fragment& fetched) { return fetched; }

  // Whether this warp has the first columns of the slice.
  __device__ __forceinline__ bool has_first() const { return first_column_ == 0; }
  // Four columns of a row, of block n: the mma rows 2s, 2s + 1, 2s + 8 and 2s + 9, where s is lane / 8.
  __device__ __forceinline__ void store_partial(float* outputs, int n, const float4& columns) const {
    __stcg(reinterpret_cast<float4*>(outputs + first_column_ + 16 * n) + lane_ / 8, columns);
  }
  template <class Write>
  __device__ __forceinline__ void finish(const Write& write, int n, const float4& columns) const {
    const int column = first_column_ + 16 * n + lane_ / 8 * 2;
    write(column, columns.x, columns.y);
    write(column + 8, columns.z, columns.w);
  }
  // This thread's columns of block n of a row's state.
  __device__ __forceinline__ float2 restored(const float* outputs, int first, int n) const {
    const int column = first + first_column_ + 16 * n + lane_ / 4;
    return {__ldcg(outputs + cuda::fragment_offset(column)), __ldcg(outputs + cuda::fragment_offset(column + 8))};
  }

 private:
  const ColumnSliceMap<C>& map_;
  const int lane_;
  const int first_column_;                       // this warp's first column in the slice
  std::uint32_t v_at_[kBlocks];                  // offset of this lane's share in a tile
  std::uint32_t v_tile_ = 0;                     // the current tile
  PipelineState<C::kVStages> stage_, released_;  // the next tile to wait for, and the next to release
};

// Values supplies V tiles as fragments (TileColumns).
template <class C, class Values = TileColumns<C>>
class ColumnOutputs {
 public:
  __device__ __forceinline__ ColumnOutputs(const typename C::Params& p, const ColumnSliceMap<C>& map,
                                           std::uint32_t rank, const Values& values)
      : p_(p),
        map_(map),
        rank_(rank),
        warp_(thread_of_cta() / 32 - C::kScoreWarps),
        lane_(thread_of_cta() % 32),
        half_(warp_ / Values::kColumnWarps),
        values_(values) {
    p_at_ = ScoreStage::block<C::kScoreBlocks>(lane_ / 16, half_) + ScoreStage::chunk(lane_ % 8, lane_ / 8 % 2);
  }

  // Whether this thread reports a failed work tile.
  __device__ bool is_leader() const { return warp_ == 0 && lane_ == 0; }

  // Returns whether the work tile has failed and must be recomputed tile by tile.
  __device__ __forceinline__ bool process(const WorkTileInfo& info) {
    const DecodeWorkTile work_tile = info.work_tile(p_);
    rows_count_ = info.get(WorkTileInfo::kRows);
    flags_ = 0;
    int begin[2], end[2];  // row ranges of all 16 rows, shared among the lanes, to find where any row begins or ends
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin[half] = info.get(WorkTileInfo::kRowBegin, lane_ / 4 + 8 * half);
      end[half] = info.get(WorkTileInfo::kRowEnd, lane_ / 4 + 8 * half);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[n][half][i] = 0.0F;
      }
    }
    const bool more = rows_count_ > 8;
    const bool idle = half_ > 0 && !more;  // its rows don't exist; another warp releases stages for it
    readers_ = kSharing == 2 && !more ? 2 : 1;
    if constexpr (HasPrefixes<typename C::Params>) {
      if (work_tile.resumes && !idle) restore(work_tile);
    }
    values_.begin(info);
    if (work_tile.begin < work_tile.end && !idle) {
      await_next(work_tile.seq_info.length - work_tile.begin * C::kKeyTile);
      for_rows(more, [&](auto all) {
        values_.choose_path([&](auto path) {
          acquire_next(path);
          fetch_first<all>(path);
        });
      });
    }
    int next = next_state(begin, end, work_tile.begin);
#pragma unroll 1
    for (int tile = work_tile.begin; tile < work_tile.end;) {
      if (tile == next) {
        if (rows_end(begin, end, tile)) store_rows(info, work_tile, tile);
        clear_rows(info, tile);
        next = next_state(begin, end, tile);
      }
      const int stop = next < work_tile.end ? next : work_tile.end;
      if (!idle) {
        for_rows(more, [&](auto all) {
          values_.choose_path([&](auto path) { add_tiles<all>(path, work_tile, tile, stop); });
        });
      }
      tile = stop;
    }
    if constexpr (kSharing > 1) {
      if (idle) skip(work_tile.end - work_tile.begin);
    }
    if (work_tile.begin < work_tile.end) {
      store_rows(info, work_tile, work_tile.end);
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
  static constexpr int kSharing = Values::kSharing;
  static constexpr int kHalves = 2 / kSharing;  // halves of 8 rows that a warp has
  static constexpr int kBlocks = Values::kBlocks;
  static constexpr int kSteps = C::kKeyTile / 16;
  static constexpr int kAhead = Values::kAhead;
  static_assert(kAhead % 2 == 0 && kAhead < kSteps);

  // Calls with(std::true_type()) if all of the warp's halves have rows, else with(std::false_type()).
  template <class With>
  __device__ __forceinline__ static void for_rows(bool more, const With& with) {
    if constexpr (kHalves == 1) {
      with(std::true_type());
    } else if (more) {
      with(std::true_type());
    } else {
      with(std::false_type());
    }
  }
  template <bool kAll>
  static constexpr int kUsed = kAll ? kHalves : 1;

  // Whether the next tile and its probabilities are ready, without waiting.
  __device__ __forceinline__ bool next_is_ready() const {
    const bool scored = barrier_ended(map_.score_full(score_state_.index), score_state_.parity);
    return values_.landed() && scored;
  }
  // Waits for both. The tile has `keys` keys.
  __device__ __forceinline__ void await_next(int keys) const {
    barrier_wait(map_.score_full(score_state_.index), score_state_.parity);
    values_.await(keys);
  }
  // Makes it the tile that is read from.
  template <class Path>
  __device__ __forceinline__ void acquire_next(Path path) {
    p_tile_ = map_.score_stage(score_state_.index).address + p_at_;
    values_.acquire(path);
    score_state_.advance();
  }
  // Skips a work tile of `tiles` tiles.
  __device__ __forceinline__ void skip(int tiles) {
    tiles_ += static_cast<std::uint32_t>(tiles);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      score_state_.advance();
      values_.skip();
    }
  }

  // Loads the fragments of 16 keys of the current tile. Probabilities are loaded for two k16 steps at a time.
  template <bool kAll, class Path>
  __device__ __forceinline__ void fetch(Path path, int step) {
    values_.fetch(path, v_[step], step);
    if (step % 2 != 0) return;
#pragma unroll
    for (int half = 0; half < kUsed<kAll>; ++half) {
      cuda::load_matrix(p_fragments_[step / 2][half], p_tile_ + ScoreStage::block<C::kScoreBlocks>(step, half));
    }
  }
  template <bool kAll, class Path>
  __device__ __forceinline__ void fetch_first(Path path) {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) fetch<kAll>(path, step);
  }
  template <bool kAll, class Path>
  __device__ __forceinline__ void multiply(Path path, int step) {
    const auto& [v] = values_.elements(path, v_[step]);
#pragma unroll
    for (int half = 0; half < kUsed<kAll>; ++half) {
      const std::uint32_t* const p = p_fragments_[step / 2][half] + step % 2 * 2;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        cuda::MmaTraits<typename C::Element>::mma(o_[n][half], v[n], p[0], p[1], o_[n][half]);
      }
    }
  }

  // Adds P V of tiles [tile, stop) of a work tile. The first k16 steps of the first one have been loaded by the usual
  // path.
  template <bool kAll, class Path>
  __device__ __forceinline__ void add_tiles(Path path, const DecodeWorkTile& work_tile, int tile, int stop) {
#pragma unroll 1
    while (tile < stop) {
      if (values_.is_usual(path)) {  // a tight loop without the other cases
#pragma unroll 1
        do add_tile<kAll>(path, work_tile, tile++);
        while (tile < stop && values_.is_usual(path));
      } else {  // fragments loaded by the usual path, of this tile and of the next, are loaded again
        fetch_first<kAll>(values_.unusual(path));
        add_tile<kAll>(values_.unusual(path), work_tile, tile++);
        if (tile < work_tile.end) fetch_first<kAll>(path);
      }
    }
  }
  template <bool kAll, class Path>
  __device__ __forceinline__ void add_tile(Path path, const DecodeWorkTile& work_tile, int tile) {
    const bool is_next = tile + 1 < work_tile.end;
    const int keys = work_tile.seq_info.length - (tile + 1) * C::kKeyTile;
    if constexpr (Values::kScoresAhead) {
      add_outputs<kAll>(path, is_next, keys);
    } else {
      add_late_outputs<kAll>(path, is_next, keys);
    }
    barrier_arrive_if(lane_ == 0, values_.next_released(), readers_);
    release_score_stage<C>(lane_ == 0, map_, tiles_, readers_);
    ++tiles_;
  }

  // Adds P V of a tile whose first k16 steps have been loaded. The next tile's are loaded meanwhile, so that the mma
  // chain never waits. Its barriers are tested well before that. It has `keys` keys.
  template <bool kAll, class Path>
  __device__ __forceinline__ void add_outputs(Path path, bool is_next, int keys) {
    bool ready = false;
#pragma unroll
    for (int step = 0; step < kSteps - kAhead; ++step) {
      fetch<kAll>(path, step + kAhead);
      multiply<kAll>(path, step);
      if (step == 0) ready = next_is_ready();
    }
    if (ready && is_next && keys >= C::kKeyTile) {
      acquire_next(path);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        multiply<kAll>(path, kSteps - kAhead + step);
        fetch<kAll>(path, step);
      }
      return;
    }
#pragma unroll
    for (int step = kSteps - kAhead; step < kSteps; ++step) multiply<kAll>(path, step);
    if (!is_next) return;
    await_next(keys);
    acquire_next(path);
    fetch_first<kAll>(path);
  }

  // The same if scores are rarely ahead: waits for the next tile before the last steps.
  template <bool kAll, class Path>
  __device__ __forceinline__ void add_late_outputs(Path path, bool is_next, int keys) {
    bool ready = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps / 2 - 1) ready = next_is_ready();
      if (step + kAhead < kSteps) fetch<kAll>(path, step + kAhead);
      multiply<kAll>(path, step);
      if (step + kAhead + 1 == kSteps && is_next) {  // all of this tile has been loaded
        if (!ready || keys < C::kKeyTile) await_next(keys);
        acquire_next(path);
      }
      if (step + kAhead >= kSteps) fetch<kAll>(path, step + kAhead - kSteps);
    }
  }

  // Clears rows that begin with `tile`: earlier tiles have added 0 · V to them.
  __device__ __forceinline__ void clear_rows(const WorkTileInfo& info, int tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (info.get(WorkTileInfo::kRowBegin, 8 * (half_ + half) + lane_ % 4 * 2 + i) != tile) continue;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          o_[n][half][i] = 0.0F;
          o_[n][half][i + 2] = 0.0F;
        }
      }
    }
    __syncwarp();
  }

  // Starts from the acc in the rows' states instead of zero.
  __device__ __forceinline__ void restore(const DecodeWorkTile& work_tile) {
    await_states();
    const int first = static_cast<int>(rank_) * C::kSliceColumns;  // this CTA's first output column
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * (half_ + half) + lane_ % 4 * 2 + i;
        if (row >= rows_count_) continue;
        const float* const state = state_of(p_, coord_of(p_, work_tile, row));
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float2 columns = values_.restored(state, first, n);
          o_[n][half][i] = columns.x;
          o_[n][half][i + 2] = columns.y;
        }
      }
    }
    __syncwarp();
  }

  // The row of a half that this thread stores.
  __device__ __forceinline__ int row_of(int half) const { return 8 * (half_ + half) + lane_ % 4 * 2 + lane_ / 4 % 2; }
  // Four columns of that row: the mma rows 2s, 2s + 1, 2s + 8 and 2s + 9, where s is lane / 8. Lanes exchange their
  // shares of each other's row.
  __device__ __forceinline__ float4 columns_of_row(int n, int half) const {
    const bool odd = lane_ / 4 % 2 != 0;
    const float(&o)[4] = o_[n][half];
    const float low = __shfl_xor_sync(0xffffffffU, odd ? o[0] : o[1], 4);
    const float high = __shfl_xor_sync(0xffffffffU, odd ? o[2] : o[3], 4);
    return odd ? float4{low, o[1], high, o[3]} : float4{o[0], low, o[2], high};
  }

  // Stores the rows that end before `tile`, with offsets and sums from the sum adder.
  __device__ __forceinline__ void store_rows(const WorkTileInfo& info, const DecodeWorkTile& work_tile, int tile) {
    const PipelineStateAt<2> turn(ends_++);
    barrier_wait(map_.ends_full(turn.index), turn.parity);
    flags_ |= load_number(map_.row_end_flags(turn.index));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = row_of(half);
      float4 columns[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) columns[n] = columns_of_row(n, half);
      if (row >= rows_count_ || info.get(WorkTileInfo::kRowEnd, row) != tile) continue;
      if (info.get(WorkTileInfo::kRowBegin, row) < tile) {
        store_row(work_tile, row, columns, load_pair(map_.row_end(turn.index, row)));
      } else if (finishes(p_, work_tile)) {
        store_empty_row(work_tile, row);
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.ends_empty(turn.index));
  }
  __device__ __forceinline__ void store_empty_rows(const DecodeWorkTile& work_tile) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (row_of(half) < rows_count_) store_empty_row(work_tile, row_of(half));
    }
  }
  __device__ __forceinline__ void store_empty_row(const DecodeWorkTile& work_tile, int row) const {
    const float4 zeros[kBlocks]{};
    store_row(work_tile, row, zeros, float2{-INFINITY, 0.0F});
  }
  // `stats`: the row's softmax_offset and sum.
  __device__ __forceinline__ void store_row(const DecodeWorkTile& work_tile, int row, const float4 (&columns)[kBlocks],
                                            float2 stats) const {
    const int slice = static_cast<int>(rank_);
    const int first = slice * C::kSliceColumns;  // this CTA's first output column
    const bool is_leader = values_.has_first() && lane_ < 8;
    const DecodeCoord coord = coord_of(p_, work_tile, row);
    if (!finishes(p_, work_tile)) {
      float* const outputs = partial_outputs<C>(p_, work_tile, row, coord) + first;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) values_.store_partial(outputs, n, columns[n]);
      if (is_leader) store_stats(p_, work_tile, slice, slice + 1, row, coord, stats);
      return;
    }
    const FinishedRow<C> finished(p_.attention, coord, stats.x, stats.y);
    const auto write = [&](int column, auto... x) { finished.write(first + column, x...); };
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) values_.finish(write, n, columns[n]);
    if (slice == 0 && is_leader) finished.write_lse();
  }

  const typename C::Params& p_;
  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  const int warp_;
  const int lane_;
  const int half_;                              // the first of its halves of the rows
  std::uint32_t p_at_;                          // offset of this lane's share in a score stage
  std::uint32_t p_tile_ = 0;                    // the current tile's
  std::uint32_t tiles_ = 0;                     // tiles of all work tiles so far
  PipelineState<C::kScoreStages> score_state_;  // score stage of the next tile
  std::uint32_t ends_ = 0;                      // row ends received from the sum adder
  int flags_ = 0;
  int rows_count_ = 0;
  int readers_ = 1;                      // warps for which this warp releases tiles
  typename Values::Fragment v_[kSteps];  // [k16 step]
  std::uint32_t p_fragments_[(kSteps + 1) / 2][kHalves][4];
  float o_[kBlocks][kHalves][4];
  Values values_;
};

}  // namespace ringattn::sm90
