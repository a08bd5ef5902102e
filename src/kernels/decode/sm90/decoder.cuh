// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroup of a decode CTA. Its arithmetic is that of prefill's consumer (consumer.cuh): the same
// functions on the same fragments, in the same order. Only the layout of rows, tiles and results differs.
#pragma once

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/recompute_tile.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode_map.cuh"
#include "kernels/decode/sm90/finish.cuh"
#include "kernels/decode/sm90/queries.cuh"

namespace ringattn::sm90 {

template <class C>
class Decoder {
 public:
  __device__ __forceinline__ Decoder(const DecodeParams& params, const DecodeMap<C>& map)
      : params_(params), p_(params.attention), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    load_queries<C>(params_, map_, rows_of(params_, work_tile),
                    [&](int tile_row) { return coord_of(params_, work_tile, tile_row); });
    attend(work_tile);
    if (finishes(params_, work_tile) || params_.partials != nullptr) return;
    for (int slice = 0; slice < params_.slices; ++slice) {
      merge_if_last<C, kDecodeConsumerThreads>(params_, work_tile, thread_of_cta(), slice);
    }
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];

  __device__ __forceinline__ void attend(const DecodeWorkTile& work_tile) {
    const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
    const bool has_rows = thread_of_cta() / 32 * 16 < rows_of(params_, work_tile);
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_.shift[half] = 0.0F;
      rows_.l[half] = 0.0F;
    }
    if (work_tile.resumes) {
      await_states();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (thread_rows.present[half]) {
          restore_row(params_, thread_rows.coord[half], rows_, half);
        } else {
          clear_row(half);
        }
      }
    }
    clear_probabilities();
#pragma unroll 1
    for (int number = work_tile.begin; number < work_tile.end; ++number, ring_.advance()) {
      const bool special = number < plain.begin || number >= plain.end;
      score(thread_rows, number, special, has_rows);
      if (special) start_rows(work_tile, thread_rows, number);
      add_outputs(number == work_tile.begin && !work_tile.resumes, work_tile.seq_info.length - number * C::kKeyTile);
    }
    store_rows(work_tile, thread_rows, work_tile.end);
  }

  // A tile's probabilities and the thread's shares of their sums. Warps without rows skip the arithmetic.
  __device__ __forceinline__ void score(const ThreadRows& thread_rows, int number, bool special, bool has_rows) {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    qk_gemm<C>(s, map_.q(), map_.k(ring_.stage()));
    wgmma_wait<0>();
    pin(s);
    if (has_rows) {
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (special) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mask_scores<0, C::kKeyTile / 8>(p_, s, half, visible_columns<C>(thread_rows, half, number));
        }
      }
      if (!__all_sync(0xffffffffU, rows_.has_offset(0) && rows_.has_offset(1))) fix_offset<C>(p_, rows_, s);
      float sum[2];
      exponentiate<C>(p_, rows_.shift, s, sum);
      if (__any_sync(0xffffffffU, sum[0] > kMax || sum[1] > kMax)) [[unlikely]] {
        Recomputed<C> recomputed;
        recompute_key_tile<C>(p_, thread_rows, number, map_.q(), map_.k(ring_.stage()), rows_.shift[0], rows_.shift[1],
                              sum[0], sum[1], recomputed);
        take_over<C>(recomputed, rows_, s, sum);
      }
      pack<C>(s, probability_);
      rows_.l[0] = __fadd_rn(rows_.l[0], sum[0]);
      rows_.l[1] = __fadd_rn(rows_.l[1], sum[1]);
    }
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.k_empty(ring_.stage()));
  }

  // Stores rows whose last tile was the previous one. Clears the acc of rows whose first tile this is: earlier tiles of
  // other rows have added 0 · V to it.
  __device__ __forceinline__ void start_rows(const DecodeWorkTile& work_tile, const ThreadRows& thread_rows,
                                             int number) {
    if (number == work_tile.begin) return;
    store_rows(work_tile, thread_rows, number);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (thread_rows.begin[half] == number) clear_row(half);
    }
  }

  // Stores the rows that end before tile `number`.
  __device__ __forceinline__ void store_rows(const DecodeWorkTile& work_tile, const ThreadRows& thread_rows,
                                             int number) {
    const float sums[2] = {sum_of_quad(rows_.l[0]), sum_of_quad(rows_.l[1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (thread_rows.end[half] != number || !thread_rows.present[half]) continue;
      if (thread_rows.begin[half] == thread_rows.end[half]) {
        // another work tile has the row, or the merge sees that it attends to no key
        if (!finishes(params_, work_tile)) continue;
        clear_row(half);
      }
      store_row<C>(params_, work_tile, thread_rows, rows_, half, sums[half]);
    }
  }

  __device__ __forceinline__ void add_outputs(bool first, int keys) {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    if (keys < C::kKeyTile) clear_tail(keys);
    pv_gemm<C>(rows_.o, probability_, map_.v(ring_.stage()), first);
    wgmma_wait<0>();
    pin(rows_.o);
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.v_empty(ring_.stage()));
  }

  // Zeroes rows of V past the end of the sequence. They have foreign data or those of another tile: their probabilities
  // are 0, but 0 · ∞ is NaN.
  __device__ __forceinline__ void clear_tail(int keys) const {
#pragma unroll 1
    for (int panel = 0; panel < C::kPanelsV; ++panel) {
      const std::uint32_t at =
          map_.v(ring_.stage()) + static_cast<std::uint32_t>(panel * cuda::panel_bytes(C::kKeyTile));
      for (int chunk = keys * 8 + thread_of_cta(); chunk < C::kKeyTile * 8; chunk += kDecodeConsumerThreads) {
        cuda::store_shared(at + static_cast<std::uint32_t>(chunk * 16), uint4{0, 0, 0, 0});
      }
    }
    proxy_fence();
    named_sync(kDecodeBarrier, kDecodeConsumerThreads);
  }

  __device__ __forceinline__ void clear_row(int half) {
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {
      rows_.o[n][2 * half] = 0.0F;
      rows_.o[n][2 * half + 1] = 0.0F;
    }
  }
  __device__ __forceinline__ void clear_probabilities() {
#pragma unroll
    for (int step = 0; step < C::kKeyTile / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) probability_[step][i] = 0;
    }
  }

  static constexpr float kMax = kRescaleThreshold<typename C::Element>;

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const DecodeMap<C>& map_;
  PackedPipelineState<C::kStages> ring_;
  AttentionState<C> rows_;
  std::uint32_t probability_[C::kKeyTile / 16][4];
};

}  // namespace ringattn::sm90
