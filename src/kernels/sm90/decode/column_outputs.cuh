// SPDX-License-Identifier: Apache-2.0
// The warps of the sliced kernel that hold outputs, where columns of V are the rows of their products and query rows
// the columns, eight at a time: so few query rows, as most steps have, leave nothing of the products empty, and less is
// read from shared memory. Each output is the same chain of additions. They take the tiles in order, whoever has scored
// them.
#pragma once

#include <type_traits>

#include "kernels/sm90/decode/finish.cuh"
#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/decode/sliced_sums.cuh"
#include "kernels/sm90/decode/tile_columns.cuh"
#include "kernels/sm90/ptx/cluster.cuh"

namespace ringattn::sm90 {

// Values: where it has tiles of V from, and how they become fragments (TileColumns).
template <class C, class Values = TileColumns<C>>
class ColumnOutputs {
 public:
  __device__ __forceinline__ ColumnOutputs(const DecodeParams& p, const SlicedMap<C>& map, std::uint32_t rank,
                                           const Values& values)
      : p_(p),
        map_(map),
        rank_(rank),
        warp_(thread_of_cta() / 32 - C::kScoreWarps),
        lane_(thread_of_cta() % 32),
        half_(warp_ / Values::kColumnWarps),
        values_(values) {
    p_at_ = ScoreSlot::block<C::kScoreBlocks>(lane_ / 16, half_) + ScoreSlot::chunk(lane_ % 8, lane_ / 8 % 2);
  }

  // Whether this warp is the one that says so when a unit has failed.
  __device__ bool speaks() const { return warp_ == 0 && lane_ == 0; }

  // Returns whether the unit has to be folded tile by tile.
  __device__ __forceinline__ bool take(const UnitNote& note) {
    const DecodeUnit unit = note.unit(p_);
    rows_count_ = note.get(UnitNote::kRows);
    flags_ = 0;
    int begin[2], end[2];  // of all rows: lanes share the question where some begin or end
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin[half] = note.get(UnitNote::kRowBegin, lane_ / 4 + 8 * half);
      end[half] = note.get(UnitNote::kRowEnd, lane_ / 4 + 8 * half);
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
    const bool idle = half_ > 0 && !more;  // of none of the unit's rows; another warp speaks for it
    readers_ = kSharing == 2 && !more ? 2 : 1;
    if constexpr (C::kResumes) {
      if (unit.resumes && !idle) restore(unit);
    }
    values_.begin(note);
    if (unit.begin < unit.end && !idle) {
      await_next(unit.of.length - unit.begin * C::kKeyTile);
      for_rows(more, [&](auto all) {
        values_.choose_way([&](auto way) {
          take_next(way);
          fetch_first<all>(way);
        });
      });
    }
    int next = next_turn(begin, end, unit.begin);
#pragma unroll 1
    for (int tile = unit.begin; tile < unit.end;) {
      if (tile == next) {
        if (rows_end(begin, end, tile)) leave_rows(note, unit, tile);
        clear_rows(note, tile);
        next = next_turn(begin, end, tile);
      }
      const int stop = next < unit.end ? next : unit.end;
      if (!idle) {
        for_rows(more, [&](auto all) { values_.choose_way([&](auto way) { add_tiles<all>(way, unit, tile, stop); }); });
      }
      tile = stop;
    }
    if constexpr (kSharing > 1) {
      if (idle) skip(unit.end - unit.begin);
    }
    if (unit.begin < unit.end) {
      leave_rows(note, unit, unit.end);
    } else if (finishes(p_, unit)) {
      leave_empty_rows(unit);
    }
    __syncwarp();
    if ((flags_ & ScoreSlot::kFails) != 0) return true;
    if (!finishes(p_, unit) && p_.records == nullptr) {
      merge_if_last<C, 32 * C::kOutWarps>(p_, unit, thread_of_cta() - 32 * C::kScoreWarps, static_cast<int>(rank_));
      __syncwarp();
    }
    return false;
  }

 private:
  static constexpr int kSharing = Values::kSharing;
  static constexpr int kHalves = 2 / kSharing;  // of 8 rows, a warp's
  static constexpr int kBlocks = Values::kBlocks;
  static constexpr int kSteps = C::kKeyTile / 16;
  static constexpr int kAhead = Values::kAhead;
  static_assert(kAhead % 2 == 0 && kAhead < kSteps);

  // Calls with(std::true_type()) where the warp has to look at all of its halves, else with(std::false_type()).
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

  // Whether the next tile and its probabilities are here, without waiting.
  __device__ __forceinline__ bool next_is_here() const {
    const bool scored = barrier_ended(map_.slot_full(slot_.place), slot_.parity);
    return values_.here() && scored;
  }
  // Until they are. `keys`: that the tile has, from its first one on.
  __device__ __forceinline__ void await_next(int keys) const {
    barrier_wait(map_.slot_full(slot_.place), slot_.parity);
    values_.await(keys);
  }
  // Then it is the one that is fetched from.
  template <class Way>
  __device__ __forceinline__ void take_next(Way way) {
    p_tile_ = map_.slot(slot_.place).address + p_at_;
    values_.take(way);
    slot_.advance();
  }
  // Of a unit of so many tiles, without a look at them.
  __device__ __forceinline__ void skip(int tiles) {
    tiles_ += static_cast<std::uint32_t>(tiles);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      slot_.advance();
      values_.skip();
    }
  }

  // What the products of 16 keys need: of the tile that is fetched from. Probabilities come for two steps at a time.
  template <bool kAll, class Way>
  __device__ __forceinline__ void fetch(Way way, int step) {
    values_.fetch(way, v_[step], step);
    if (step % 2 != 0) return;
#pragma unroll
    for (int half = 0; half < kUsed<kAll>; ++half) {
      cuda::load_matrix(weights_[step / 2][half], p_tile_ + ScoreSlot::block<C::kScoreBlocks>(step, half));
    }
  }
  template <bool kAll, class Way>
  __device__ __forceinline__ void fetch_first(Way way) {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) fetch<kAll>(way, step);
  }
  template <bool kAll, class Way>
  __device__ __forceinline__ void multiply(Way way, int step) {
    const auto& [v] = values_.elements(way, v_[step]);
#pragma unroll
    for (int half = 0; half < kUsed<kAll>; ++half) {
      const std::uint32_t* const p = weights_[step / 2][half] + step % 2 * 2;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        cuda::Products<typename C::Element>::mma(o_[n][half], v[n], p[0], p[1], o_[n][half]);
      }
    }
  }

  // P V of tiles [tile, stop) of a unit. Of the first one the first steps have been fetched, the usual way.
  template <bool kAll, class Way>
  __device__ __forceinline__ void add_tiles(Way way, const DecodeUnit& unit, int tile, int stop) {
#pragma unroll 1
    while (tile < stop) {
      if (values_.is_usual(way)) {  // a loop of its own, so that nothing of the others lies in between
#pragma unroll 1
        do add_tile<kAll>(way, unit, tile++);
        while (tile < stop && values_.is_usual(way));
      } else {  // what has been fetched the usual way, of this tile and of the next one, is fetched anew
        fetch_first<kAll>(values_.unusual(way));
        add_tile<kAll>(values_.unusual(way), unit, tile++);
        if (tile < unit.end) fetch_first<kAll>(way);
      }
    }
  }
  template <bool kAll, class Way>
  __device__ __forceinline__ void add_tile(Way way, const DecodeUnit& unit, int tile) {
    const bool is_next = tile + 1 < unit.end;
    const int keys = unit.of.length - (tile + 1) * C::kKeyTile;
    if constexpr (Values::kScoresAhead) {
      add_outputs<kAll>(way, is_next, keys);
    } else {
      add_late_outputs<kAll>(way, is_next, keys);
    }
    barrier_arrive_if(lane_ == 0, values_.next_released(), readers_);
    slot_is_read<C>(lane_ == 0, map_, tiles_, readers_);
    ++tiles_;
  }

  // P V of a tile, whose first steps have been fetched; the next tile's are fetched on the way, so that the chain of
  // products goes on without a wait. Whether it is here is asked well before that. `keys`: that it has.
  template <bool kAll, class Way>
  __device__ __forceinline__ void add_outputs(Way way, bool is_next, int keys) {
    bool here = false;
#pragma unroll
    for (int step = 0; step < kSteps - kAhead; ++step) {
      fetch<kAll>(way, step + kAhead);
      multiply<kAll>(way, step);
      if (step == 0) here = next_is_here();
    }
    if (here && is_next && keys >= C::kKeyTile) {
      take_next(way);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        multiply<kAll>(way, kSteps - kAhead + step);
        fetch<kAll>(way, step);
      }
      return;
    }
#pragma unroll
    for (int step = kSteps - kAhead; step < kSteps; ++step) multiply<kAll>(way, step);
    if (!is_next) return;
    await_next(keys);
    take_next(way);
    fetch_first<kAll>(way);
  }

  // The same where scores are seldom far ahead: the next tile is waited for in front of the last steps.
  template <bool kAll, class Way>
  __device__ __forceinline__ void add_late_outputs(Way way, bool is_next, int keys) {
    bool here = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps / 2 - 1) here = next_is_here();
      if (step + kAhead < kSteps) fetch<kAll>(way, step + kAhead);
      multiply<kAll>(way, step);
      if (step + kAhead + 1 == kSteps && is_next) {  // of this tile everything has been fetched
        if (!here || keys < C::kKeyTile) await_next(keys);
        take_next(way);
      }
      if (step + kAhead >= kSteps) fetch<kAll>(way, step + kAhead - kSteps);
    }
  }

  // Rows that begin with `tile` have nothing of those before: what they have is 0 · V.
  __device__ __forceinline__ void clear_rows(const UnitNote& note, int tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (note.get(UnitNote::kRowBegin, 8 * (half_ + half) + lane_ % 4 * 2 + i) != tile) continue;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          o_[n][half][i] = 0.0F;
          o_[n][half][i + 2] = 0.0F;
        }
      }
    }
    __syncwarp();
  }

  // What rows have in their states, instead of nothing.
  __device__ __forceinline__ void restore(const DecodeUnit& unit) {
    await_states();
    const int first = static_cast<int>(rank_) * C::kSliceColumns;  // of all columns
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * (half_ + half) + lane_ % 4 * 2 + i;
        if (row >= rows_count_) continue;
        const float* const state = state_of(p_, place_of(p_, unit, row));
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

  // The row, of those of a half, that this thread leaves.
  __device__ __forceinline__ int row_of(int half) const { return 8 * (half_ + half) + lane_ % 4 * 2 + lane_ / 4 % 2; }
  // Four columns of that row, of the product's rows 2s, 2s + 1, 2s + 8 and 2s + 9, where s is lane / 8. Lanes exchange
  // what they have of each other's row.
  __device__ __forceinline__ float4 columns_of_row(int n, int half) const {
    const bool odd = lane_ / 4 % 2 != 0;
    const float(&o)[4] = o_[n][half];
    const float low = __shfl_xor_sync(0xffffffffU, odd ? o[0] : o[1], 4);
    const float high = __shfl_xor_sync(0xffffffffU, odd ? o[2] : o[3], 4);
    return odd ? float4{low, o[1], high, o[3]} : float4{o[0], low, o[2], high};
  }

  // The rows that end in front of `tile`, of which the sums' warp tells.
  __device__ __forceinline__ void leave_rows(const UnitNote& note, const DecodeUnit& unit, int tile) {
    const Turn<2> turn(ends_++);
    barrier_wait(map_.ends_full(turn.place), turn.parity);
    flags_ |= load_number(map_.row_end_flags(turn.place));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = row_of(half);
      float4 columns[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) columns[n] = columns_of_row(n, half);
      if (row >= rows_count_ || note.get(UnitNote::kRowEnd, row) != tile) continue;
      if (note.get(UnitNote::kRowBegin, row) < tile) {
        leave_row(unit, row, columns, load_pair(map_.row_end(turn.place, row)));
      } else if (finishes(p_, unit)) {
        leave_empty_row(unit, row);
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.ends_empty(turn.place));
  }
  __device__ __forceinline__ void leave_empty_rows(const DecodeUnit& unit) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (row_of(half) < rows_count_) leave_empty_row(unit, row_of(half));
    }
  }
  __device__ __forceinline__ void leave_empty_row(const DecodeUnit& unit, int row) const {
    const float4 zeros[kBlocks]{};
    leave_row(unit, row, zeros, float2{-INFINITY, 0.0F});
  }
  // `numbers`: the row's reference and sum.
  __device__ __forceinline__ void leave_row(const DecodeUnit& unit, int row, const float4 (&columns)[kBlocks],
                                            float2 numbers) const {
    const int slice = static_cast<int>(rank_);
    const int first = slice * C::kSliceColumns;  // of all columns
    const bool speaks = values_.has_first() && lane_ < 8;
    const DecodePlace place = place_of(p_, unit, row);
    if (!finishes(p_, unit)) {
      float* const outputs = left_outputs<C>(p_, unit, row, place) + first;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) values_.leave(outputs, n, columns[n]);
      if (speaks) leave_numbers(p_, unit, slice, slice + 1, row, place, numbers);
      return;
    }
    const FinishedRow<C> finished(p_, place, numbers.x, numbers.y);
    const auto write = [&](int column, auto... x) { finished.write(first + column, x...); };
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) values_.finish(write, n, columns[n]);
    if (slice == 0 && speaks) finished.write_lse();
  }

  const DecodeParams& p_;
  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  const int warp_;
  const int lane_;
  const int half_;            // the first of its halves of the rows
  std::uint32_t p_at_;        // where this lane's share of a slot begins
  std::uint32_t p_tile_ = 0;  // that is fetched from
  std::uint32_t tiles_ = 0;   // so far, of all units
  Lap<C::kSlots> slot_;       // of the next one
  std::uint32_t ends_ = 0;    // of which the sums' warp has told
  int flags_ = 0;
  int rows_count_ = 0;
  int readers_ = 1;                      // for whom this warp says that a tile has been read
  typename Values::Fragment v_[kSteps];  // of the products, by step
  std::uint32_t weights_[(kSteps + 1) / 2][kHalves][4];
  float o_[kBlocks][kHalves][4];
  Values values_;
};

}  // namespace ringattn::sm90
