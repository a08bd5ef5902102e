// SPDX-License-Identifier: Apache-2.0
// Recomputes work tiles of shared prefixes (prefix.cuh) tile by tile with a single warpgroup, if a row exceeds the
// rescale threshold or has no softmax_offset in the first tile.
//
// All rows see all keys of a work tile, so every tile is plain, and a tile's softmax overlaps P V of the previous tile.
// The arithmetic is prefill's: the same functions on the same fragments, in the same order.
#pragma once

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/recompute_tile.cuh"
#include "kernels/decode/sm90/finish.cuh"
#include "kernels/decode/sm90/prefix_work_tiles.cuh"
#include "kernels/decode/sm90/queries.cuh"

namespace ringattn::sm90 {

// The coordinates of a thread's rows of a work tile, for rows that exist.
template <class C>
__device__ __forceinline__ ThreadRows prefix_thread_rows(const DecodeParams& params, const PrefixMap<C>& map,
                                                         const PrefixWorkTile& work_tile) {
  ThreadRows thread_rows{};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = tile_row_of_thread() + 8 * half;
    thread_rows.present[half] = tile_row < work_tile.rows;
    if (thread_rows.present[half]) thread_rows.coord[half] = coord_of(params, map, work_tile, tile_row);
  }
  return thread_rows;
}

// Stores the partials of a work tile's rows, or their states, from `first_column` on (store_row(), save_row()).
template <class C>
__device__ __forceinline__ void store_prefix_rows(const DecodeParams& params, const ThreadRows& thread_rows,
                                                  const PrefixWorkTile& work_tile, const AttentionState<C>& rows,
                                                  int first_column = 0) {
  const float sums[2] = {sum_of_quad(rows.l[0]), sum_of_quad(rows.l[1])};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!thread_rows.present[half]) continue;
    if (work_tile.is_partial()) {
      save_row(params, thread_rows.coord[half], rows, half, first_column);
    } else {
      store_row<C>(params, work_tile.decode_tile, thread_rows, rows, half, sums[half], first_column);
    }
  }
}

template <class C>
class PrefixConsumer {
 public:
  // `ring`: the stage of its first tile.
  __device__ __forceinline__ PrefixConsumer(const DecodeParams& params, const PrefixMap<C>& map,
                                            PackedPipelineState<C::kStages> ring)
      : params_(params), p_(params.attention), map_(map), ring_(ring) {}

  __device__ __forceinline__ void process(const PrefixWorkTile& work_tile) {
    load_queries<C>(params_, map_, work_tile.rows,
                    [&](int tile_row) { return coord_of(params_, map_, work_tile, tile_row); });
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_.shift[half] = 0.0F;
      rows_.l[half] = 0.0F;
    }
    tile_ = work_tile.decode_tile.begin;
    end_ = work_tile.decode_tile.end;
    score_first();
    bool special = still_special();
    bool first = true;
    while (tile_ + 1 < end_) {
      if (special) {
        add_outputs_and_score<true>(first);
        special = still_special();
      } else {
#pragma unroll 1
        while (tile_ + 1 < end_) {
          add_outputs_and_score<false>(first);
          first = false;
        }
      }
      first = false;
    }
    add_outputs(first);
    store_prefix_rows(params_, prefix_thread_rows(params_, map_, work_tile), work_tile, rows_);
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];

  // Whether the next tile is special: rows have no softmax_offset yet, or scores are scaled first. The warps of a
  // warpgroup must take the same path through its wgmma.
  __device__ __forceinline__ bool still_special() const {
    const bool more = p_.softmax.scaled_first || !rows_.has_offset(0) || !rows_.has_offset(1);
    return named_any(kDecodeBarrier, kDecodeConsumerThreads, more);
  }

  // Scores → probabilities and the thread's shares of their sums. Returns whether a row of the warp exceeds the rescale
  // threshold.
  template <bool kSpecial>
  __device__ __forceinline__ bool softmax_step(Scores& s) {
    if constexpr (kSpecial) {
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      fix_offset<C>(p_, rows_, s);
    }
    exponentiate<C>(p_, rows_.shift, s, sum_);
    return __any_sync(0xffffffffU, sum_[0] > kMax || sum_[1] > kMax) != 0;
  }
  // The visible keys for recompute_key_tile(): all of them.
  __device__ __forceinline__ ThreadRows all_keys() const {
    ThreadRows thread_rows{};
    thread_rows.high[0] = thread_rows.high[1] = end_ * C::kKeyTile;
    return thread_rows;
  }
  __device__ __forceinline__ void recompute(Scores& s) {
    Recomputed<C> recomputed;
    recompute_key_tile<C>(p_, all_keys(), tile_, map_.q(), map_.k(ring_.stage()), rows_.shift[0], rows_.shift[1],
                          sum_[0], sum_[1], recomputed);
    take_over<C>(recomputed, rows_, s, sum_);
  }
  __device__ __forceinline__ void add_sums() {
    rows_.l[0] = __fadd_rn(rows_.l[0], sum_[0]);
    rows_.l[1] = __fadd_rn(rows_.l[1], sum_[1]);
  }
  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (thread_of_cta() % 32 == 0) barrier_arrive(barrier);
  }

  // Computes the probabilities of a work tile's first tile.
  __device__ __forceinline__ void score_first() {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    qk_gemm<C>(s, map_.q(), map_.k(ring_.stage()));
    wgmma_wait<0>();
    pin(s);
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {  // keeps the registers defined; the first P V overwrites them
#pragma unroll
      for (int i = 0; i < 4; ++i) rows_.o[n][i] = 0.0F;
    }
    if (softmax_step<true>(s)) [[unlikely]]
      recompute(s);
    release(map_.k_empty(ring_.stage()));
    pack<C>(s, probability_);
    add_sums();
  }

  // Computes P V of the previous tile, whose probabilities are ready, and during that wgmma the next tile's
  // probabilities.
  template <bool kSpecial>
  __device__ __forceinline__ void add_outputs_and_score(bool first) {
    PackedPipelineState<C::kStages> next = ring_;
    next.advance();
    Scores s;
    barrier_wait(map_.k_full(next.stage()), next.parity());
    qk_gemm<C>(s, map_.q(), map_.k(next.stage()));
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    pv_gemm<C>(rows_.o, probability_, map_.v(ring_.stage()), first);
    wgmma_wait<1>();
    pin(s);
    const bool exceeds_threshold = softmax_step<kSpecial>(s);
    end_block(p_);
    wgmma_wait<0>();
    pin(rows_.o);
    release(map_.v_empty(ring_.stage()));
    ring_ = next;
    ++tile_;
    if (exceeds_threshold) [[unlikely]]
      recompute(s);
    release(map_.k_empty(ring_.stage()));
    pack<C>(s, probability_);
    add_sums();
  }

  __device__ __forceinline__ void add_outputs(bool first) {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    pv_gemm<C>(rows_.o, probability_, map_.v(ring_.stage()), first);
    wgmma_wait<0>();
    pin(rows_.o);
    release(map_.v_empty(ring_.stage()));
    ring_.advance();
  }

  static constexpr float kMax = kRescaleThreshold<typename C::Element>;

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const PrefixMap<C>& map_;
  PackedPipelineState<C::kStages> ring_;
  AttentionState<C> rows_;
  int tile_ = 0, end_ = 0;  // the tile whose probabilities are ready, and the end of the work tile
  float sum_[2] = {};       // Σ p of this thread's columns of the tile
  std::uint32_t probability_[C::kKeyTile / 16][4];
};

}  // namespace ringattn::sm90
