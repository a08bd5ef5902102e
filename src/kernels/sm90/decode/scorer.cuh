// SPDX-License-Identifier: Apache-2.0
// The warps of the sliced kernel that score. A warp does a whole tile at a time, 16 rows by mma.sync, in the fragments
// of the fold's products, so that the fold's own tile step works on them. It writes what comes of it into a slot of
// every CTA of the cluster.
#pragma once

#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/fold/redo.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class Scorer {
 public:
  __device__ __forceinline__ Scorer(const DecodeParams& params, const SlicedMap<C>& map, std::uint32_t rank)
      : params_(params),
        p_(params.fold),
        map_(map),
        rank_(rank),
        warp_(static_cast<std::uint32_t>(thread_of_cta()) / 32),
        lane_(thread_of_cta() % 32) {}

  // References come from one tile, for all rows and tiles at once. Where that doesn't do, the slots say so.
  __device__ __forceinline__ void score(const DecodeUnit& unit) {
    begin(unit);
    const int reference = reference_tile<C>(params_, unit);
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    const std::uint32_t reference_number = begin + static_cast<std::uint32_t>(reference - unit.begin);
    {
      Scores s;
      products(s, true);
      adjust(s, reference);
      settle<C>(p_, rows_, s);
      const bool none[2] = {slots_.begin[0] == slots_.end[0], slots_.begin[1] == slots_.end[1]};
      const bool fails = (!none[0] && (!rows_.seen(0) || first_tile(unit, 0) != reference)) ||
                         (!none[1] && (!rows_.seen(1) || first_tile(unit, 1) != reference));
      flags_ = __any_sync(0xffffffffU, fails) ? ScoreSlot::kFails : 0;
      if (owns(reference_number)) weigh_and_send(s, reference_number);
    }
    for (std::uint32_t number = begin + ((rank_ - begin) & (C::kSlices - 1U)); number < tiles_; number += C::kSlices) {
      if (number == reference_number) continue;
      const bool mine = owns(number);
      Scores s;
      products(s, mine);
      if (!mine) continue;
      adjust(s, unit.begin + static_cast<int>(number - begin));
      weigh_and_send(s, number);
    }
  }

  // The fold's own way: tile by tile, references move where rows outgrow them. The first warp of the first CTA does it.
  __device__ __forceinline__ void score_in_order(const DecodeUnit& unit) {
    if (rank_ != 0) {
      tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
      return;
    }
    begin(unit);
    if (warp_ == 0) store_queries();
    for (int tile = unit.begin; tile < unit.end; ++tile, ++tiles_) {
      Scores s;
      const Turn<C::kKStages> turn(ks_);
      products(s, warp_ == 0, /*keeps=*/warp_ == 0);
      if (warp_ != 0) continue;
      adjust(s, tile);
      if (!__all_sync(0xffffffffU, rows_.seen(0) && rows_.seen(1))) settle<C>(p_, rows_, s);
      float sum[2];
      exponentiate<C>(p_, rows_.shift, s, sum);
      float factor[2] = {1.0F, 1.0F};
      flags_ = 0;
      if (__any_sync(0xffffffffU, sum[0] > kMost || sum[1] > kMost)) {
        Redone<C> redone;
        redo<C>(p_, slots_, tile, map_.q(), map_.k(turn.place), rows_.shift[0], rows_.shift[1], sum[0], sum[1], redone);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!redone.outgrown[half]) continue;
          factor[half] = redone.factor[half];
          rows_.shift[half] = redone.shift[half];
          sum[half] = redone.sum[half];
#pragma unroll
          for (int j = 0; j < C::kKeyTile / 8; ++j) {
            s[j][2 * half] = redone.s[j][2 * half];
            s[j][2 * half + 1] = redone.s[j][2 * half + 1];
          }
        }
        flags_ = ScoreSlot::kRescales;
      }
      __syncwarp();
      if (lane_ == 0) barrier_arrive(map_.k_empty(turn.place));
      send(s, sum, factor, tiles_);
    }
  }
  __device__ __forceinline__ void begin_again() {
    tiles_ = 0;
    ks_ = 0;
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];

  // Query rows straight into fragments; those that aren't there are zeros.
  __device__ __forceinline__ void begin(const DecodeUnit& unit) {
    slots_ = slots_of<C>(params_, unit, lane_ / 4);
    rows_count_ = rows_of(params_, unit);
    rows_.flags = 0;
    const DecodeRow first = row_of<C>(params_, unit, 0);
    const DecodeRow last = row_of<C>(params_, unit, rows_count_ - 1);
    const KeyRange common = Visibility(p_.mask, unit.of.length).common_keys(first.position, last.position);
    common_ = {common.empty() ? kNoKey : static_cast<int>(common.begin),
               common.empty() ? 0 : static_cast<int>(common.end)};
    const auto* const q = static_cast<const std::uint16_t*>(p_.q.data);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_.shift[half] = 0.0F;
      const std::uint16_t* const row =
          q + slots_.row[half] * p_.q.token_stride + slots_.query_head[half] * p_.q.head_stride;
      const bool paired = reinterpret_cast<std::uint64_t>(row) % 4 == 0;
#pragma unroll
      for (int i = 0; i < C::kDim / 8; ++i) {
        const std::uint16_t* const at = row + 8 * i + lane_ % 4 * 2;
        std::uint32_t pair = 0;
        if (slots_.present[half]) {
          pair = paired ? *reinterpret_cast<const std::uint32_t*>(at) : at[0] | static_cast<std::uint32_t>(at[1]) << 16;
        }
        q_[i / 2][i % 2 * 2 + half] = pair;
      }
    }
  }
  // What redo() reads.
  __device__ __forceinline__ void store_queries() const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cuda::store_shared(map_.q() + static_cast<std::uint32_t>(i / 8 * cuda::panel_bytes(C::kQueryRows)) +
                               cuda::swizzled(lane_ / 4 + 8 * half, i % 8) + static_cast<std::uint32_t>(lane_ % 4 * 4),
                           q_[i / 2][i % 2 * 2 + half]);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool owns(std::uint32_t number) const {
    return (number & (C::kSlices - 1U)) == rank_ && number / C::kSlices % kScoreWarps == warp_;
  }
  __device__ __forceinline__ int first_tile(const DecodeUnit& unit, int half) const {
    const int tile = slots_.low[half] / C::kKeyTile;
    return tile > unit.begin ? tile : unit.begin;
  }

  // Q Kᵀ of the K tile that has arrived next; only where this warp is to work at it. All warps give the tile back.
  __device__ __forceinline__ void products(Scores& s, bool mine, bool keeps = false) {
    const Turn<C::kKStages> turn(ks_++);
    barrier_wait(map_.k_full(turn.place), turn.parity);
    if (mine) {
#pragma unroll
      for (int j = 0; j < C::kKeyTile / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = 0.0F;
      }
      const std::uint32_t at = map_.k(turn.place) + cuda::swizzled(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
#pragma unroll
      for (int step = 0; step < C::kDim / 16; ++step) {
        const std::uint32_t columns = cuda::at_columns<C::kKeyTile>(at, step);
        std::uint32_t b[C::kKeyTile / 16][4];  // all at once: shared memory is far from a product that waits for it
#pragma unroll
        for (int block = 0; block < C::kKeyTile / 16; ++block) {
          cuda::load_matrix(b[block], columns + static_cast<std::uint32_t>(block * 16 * kPanelRowBytes));
        }
#pragma unroll
        for (int block = 0; block < C::kKeyTile / 16; ++block) {
          const std::uint32_t(&k)[4] = b[block];
          cuda::Products<typename C::Element>::mma(s[2 * block], q_[step], k[0], k[1], s[2 * block]);
          cuda::Products<typename C::Element>::mma(s[2 * block + 1], q_[step], k[2], k[3], s[2 * block + 1]);
        }
      }
    }
    if (keeps) return;
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.k_empty(turn.place));
  }

  __device__ __forceinline__ void adjust(Scores& s, int tile) const {
    if (p_.softmax.scaled_first) scale_scores(p_, s);
    if (common_.begin <= tile * C::kKeyTile && (tile + 1) * C::kKeyTile <= common_.end) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mask_scores<0, C::kKeyTile / 8>(p_, s, half, visible_columns<C>(slots_, half, tile));
    }
  }

  __device__ __forceinline__ void weigh_and_send(Scores& s, std::uint32_t number) {
    float sum[2];
    exponentiate<C>(p_, rows_.shift, s, sum);
    if (__any_sync(0xffffffffU, sum[0] > kMost || sum[1] > kMost)) flags_ |= ScoreSlot::kFails;
    const float factor[2] = {1.0F, 1.0F};
    send(s, sum, factor, number);
  }

  // Writes a tile's slot here, and from here to the other CTAs.
  __device__ __forceinline__ void send(const Scores& s, const float (&sum)[2], const float (&factor)[2],
                                       std::uint32_t number) const {
    const Turn<C::kSlots> turn(number);
    const ScoreSlot slot = map_.slot(turn.place);
    std::uint32_t probability[C::kKeyTile / 16][4];
    pack<C>(s, probability);
    barrier_wait(map_.slot_empty(turn.place), turn.parity ^ 1U);
    const auto store = [](std::uint32_t at, float x) { cuda::store_shared(at, __float_as_uint(x)); };
    if (lane_ == 0) store_number(slot.address, flags_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + 8 * half;
      if (row >= rows_count_) continue;
      store(slot.sum(row, lane_ % 4), sum[half]);
      if (lane_ % 4 == 0) {
        store(slot.factor(row), factor[half]);
        store(slot.reference(row), reference_of(rows_, half));
      }
#pragma unroll
      for (int j = 0; j < C::kKeyTile / 8; ++j) {
        cuda::store_shared(slot.chunk(row, j) + static_cast<std::uint32_t>(lane_ % 4 * 4),
                           probability[j / 2][2 * (j % 2) + half]);
      }
    }
    if constexpr (C::kSlices > 1) {
      proxy_fence();
      __syncwarp();
      const auto to = static_cast<std::uint32_t>(lane_);
      if (to < C::kSlices && to != rank_) {
        send_bytes(in_cta(slot.address, to), slot.address, ScoreSlot::bytes(rows_count_),
                   in_cta(map_.slot_full(turn.place), to));
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.slot_full(turn.place));
  }

  static constexpr float kMost = kOutgrown<typename C::Element>;

  const DecodeParams& params_;
  const cuda::FoldParams& p_;
  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  const std::uint32_t warp_;
  const int lane_;
  std::uint32_t tiles_ = 0;  // so far, of all units
  std::uint32_t ks_ = 0;     // K tiles so far, of this CTA
  DecodeSlots slots_;
  ColumnRange common_;  // keys that all rows see
  int rows_count_ = 0;
  int flags_ = 0;
  Rows<C> rows_;  // references alone
  std::uint32_t q_[C::kDim / 16][4];
};

}  // namespace ringattn::sm90
