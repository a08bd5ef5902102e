// SPDX-License-Identifier: Apache-2.0
// Computes the KV splits of shared prefixes once for all sequences that share them (cascade attention): rows of many
// sequences are packed into one M. A work tile stores its rows' partials. For a split that continues after the prefix
// it stores their states, from which the next launch resumes. That launch stores the partials of each sequence's own
// splits, and a merge finishes the rows.
//
// There are few work tiles, so the latency of each counts. Two warpgroups score tiles alternately and write the
// probabilities to shared memory; only one does if the accumulators leave no registers for two. Another warpgroup adds
// P V of all tiles, in order. So the tensor cores have work during the softmax. The arithmetic is prefill's: the same
// functions on the same fragments, in the same order.
//
// If there are enough multiprocessors, a CTA pair (a cluster of two) computes a work tile. Each CTA scores every second
// tile, sends the probabilities to both, and has half of the output columns. So each column's chain of additions also
// goes through all tiles in order.
//
// Tiles are thus scored before the tiles ahead of them are complete. This works because softmax_offsets rarely move:
// they are taken from a work tile's first tile, which both CTAs of a pair score. If an offset moves, or is not set by
// then, the CTA, or the first one of the pair, recomputes its work tiles tile by tile, which writes
// the same partials for work tiles that had not failed.
#pragma once

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/prefix_work_tiles.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"

namespace ringattn::sm90 {

// The scoring warpgroups of the prefix kernel (prefix.cuh), which write probabilities to shared memory for the output
// warpgroup. They have the same number of turns in every work tile, so turns and panels never depend on how many tiles
// earlier work tiles had. If a work tile has fewer tiles than turns, its last tile is scored again.

// The nth tile of a work tile that a CTA scores. The second CTA of a pair also scores the first tile, only for its
// softmax_offsets.
template <class C>
__device__ __forceinline__ int scored_tile(int rank, int nth) {
  return max(C::kSlices * nth - rank, 0);
}
template <class C>
__device__ __forceinline__ int scored_tiles(int rank, int turns) {
  return turns / C::kSlices + (C::kSlices == 1 || rank == 0 ? 0 : 1);
}

// A scoring warpgroup: every kScorers-th of the CTA's own tiles, from tile number `which` on.
template <class C>
class PrefixScorer {
 public:
  __device__ __forceinline__ PrefixScorer(const PrefixParams& params, const PrefixMap<C>& map, int rank, int which)
      : p_(params.attention),
        map_(map),
        rank_(rank),
        which_(which),
        own_(rank + C::kSlices * which),
        number_(static_cast<std::uint32_t>(own_)) {
    if (which_ != 0) ring_.advance();
  }

  __device__ __forceinline__ void process(const PrefixWorkTile& work_tile) {
    load_queries();
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.shift[half] = 0.0F;
    constexpr int kStep = scoring_warpgroups<C>();
    static_assert(kTilesPerKvSplit % kStep == 0);
    const int turns = work_tile.turns<C>();
    // A warpgroup waits for a panel to be released only if it has itself filled that panel, or a later one, in an
    // earlier turn. So it can't miss a phase.
    static_assert(C::kSlices == 1 || PrefixMap<C>::kPanels >= kStep * PrefixMap<C>::kTilePanels);
    const int first = which_ == 0 ? 0 : own_;
    if (rank_ != 0 && which_ != 0) ring_.advance();  // the other warpgroup scores the work tile's first tile
#pragma unroll 1
    for (int tile = first; tile < turns;) {
      Scores s;
      if (kAlternates && (which_ != 0 || tile > own_)) named_sync(kPrefixOrderBarrier + which_, 2 * kWarpgroup);
      barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
      multiply(s, map_.k(ring_.stage()));
      if (kAlternates && tile >= own_ && (which_ == 0 || tile + kStep < turns)) {
        named_arrive(kPrefixOrderBarrier + 1 - which_, 2 * kWarpgroup);
      }
      wgmma_wait<0>();
      pin(s);
      if (thread_of_cta() % 32 == 0) barrier_arrive(map_.k_empty(ring_.stage()));
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (tile == first) fix_or_load_offsets(s);
      if (C::kSlices > 1 && tile < own_) {
        tile = own_;
        ring_.advance();
        continue;
      }
      float sum[2];
      exponentiate<C>(p_, rows_.shift, s, sum);
      if (sum[0] > kMax || sum[1] > kMax) mark_failed();
      send(s, sum);
#pragma unroll
      for (int i = 0; i < C::kScorers; ++i) ring_.advance();
      number_ += kStep;
      tile += kStep;
    }
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];
  static constexpr int kSteps = C::kDim / 16;
  // K stages pass from one warpgroup to the other. A warpgroup must not wait for a stage before the other one has seen
  // it full, or it would take that phase for its own. In a single CTA the panels' barriers guarantee this.
  static constexpr bool kAlternates = C::kSlices > 1;
  static_assert(!kAlternates || C::kScorers == 2);
  static constexpr float kMax = kRescaleThreshold<typename C::Element>;

  // Loads query rows as fragments: probabilities overwrite their memory later.
  __device__ __forceinline__ void load_queries() {
    named_sync(kPrefixQueries, (1 + C::kScorers) * kWarpgroup);
    const std::uint32_t q = map_.q() + offset_of_lane();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) cuda::load_matrix(q_[step], cuda::at_columns<kQueryTile>(q, step));
    named_sync(kPrefixQueriesRead, C::kScorers * kWarpgroup);
  }
  // Offset in a panel of this lane's row and chunk of a 16 × 16 block that the warp loads or stores.
  __device__ __forceinline__ static std::uint32_t offset_of_lane() {
    const int lane = thread_of_cta() % 32;
    return cuda::swizzled(thread_of_warpgroup() / 32 * 16 + lane % 16, lane / 16);
  }

  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t k_tile) const {
    const std::uint32_t k = warp_uniform(descriptor_low(k_tile));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto at = static_cast<std::uint32_t>((step / 4 * cuda::panel_bytes(C::kKeyTile) + step % 4 * 32) >> 4);
      Wgmma<typename C::Element, C::kKeyTile>::rk(s, q_[step], descriptor(k + at), step > 0);
    }
    wgmma_commit();
  }

  // The offsets of a work tile's first tile: the warpgroup that scores it fixes them and posts them to the other one.
  __device__ __forceinline__ void fix_or_load_offsets(const Scores& s) {
    const std::uint32_t address = map_.shift(thread_of_warpgroup());
    if (which_ == 0) {
      fix_offset<C>(p_, rows_, s);
      if (!rows_.has_offset(0) || !rows_.has_offset(1)) mark_failed();
      store_pair(address, rows_.shift[0], rows_.shift[1]);
      if (C::kScorers > 1) named_arrive(kPrefixOffsets, C::kScorers * kWarpgroup);
    } else {
      named_sync(kPrefixOffsets, C::kScorers * kWarpgroup);
      const float2 shift = load_pair(address);
      rows_.shift[0] = shift.x;
      rows_.shift[1] = shift.y;
    }
  }
  __device__ __forceinline__ void mark_failed() const {
    if constexpr (C::kSlices > 1) {
      dsmem_store(map_to_cta(map_.failed(), 0), 1);  // the first CTA of a pair recomputes
    } else {
      store_number(map_.failed(), 1);
    }
  }
  // The peer CTA.
  __device__ __forceinline__ std::uint32_t other() const { return static_cast<std::uint32_t>(1 - rank_); }

  __device__ __forceinline__ void send(const Scores& s, const float (&sum)[2]) const {
    std::uint32_t probability[C::kKeyTile / 16][4];
    pack<C>(s, probability);
    const auto turn_of = [&](int panel) {
      return PipelineStateAt<PrefixMap<C>::kPanels>(number_ * PrefixMap<C>::kTilePanels +
                                                    static_cast<std::uint32_t>(panel));
    };
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      const auto turn = turn_of(panel);
      barrier_wait(map_.panel_empty(turn.index), turn.parity ^ 1U);
      const std::uint32_t to = map_.panel(turn.index) + offset_of_lane();
#pragma unroll
      for (int step = 0; step < panel_steps<C>(panel); ++step) {
        store_matrix(cuda::at_columns<kQueryTile>(to, step), probability[4 * panel + step]);
      }
      if (panel == 0 && adds_sums()) store_pair(map_.sums(number_, thread_of_warpgroup()), sum[0], sum[1]);
    }
    // One fence for both panels: it waits until the writes are complete.
    proxy_fence();
    __syncwarp();
    if (!adds_sums()) {
      dsmem_store_pair_async(map_to_cta(map_.sums(number_, thread_of_warpgroup()), 0),
                             map_to_cta(map_.panel_full(turn_of(0).index), 0), sum[0], sum[1]);
    }
    if (!elect_one()) return;
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      const std::uint32_t address = turn_of(panel).index;
      barrier_arrive(map_.panel_full(address));
      if constexpr (C::kSlices > 1) send_rows(address, panel);
    }
  }
  // Whether this CTA's output warpgroup adds the sums: the first CTA of a pair does.
  __device__ __forceinline__ bool adds_sums() const { return C::kSlices == 1 || rank_ == 0; }
  // Sends the warp's rows of a panel to the peer CTA, where the same panel is free: its output warpgroup has arrived
  // here too.
  __device__ __forceinline__ void send_rows(std::uint32_t address, int panel) const {
    constexpr int kWarpBytes = 16 * kPanelRowBytes;
    const std::uint32_t rows =
        map_.panel(address) + static_cast<std::uint32_t>(thread_of_warpgroup() / 32 * kWarpBytes);
    const std::uint32_t barrier = map_to_cta(map_.panel_full(address), other());
    const int sums = panel == 0 && !adds_sums() ? 32 * 8 : 0;
    barrier_arrive_expect_at(barrier, kWarpBytes + sums);
    dsmem_copy_expected(map_to_cta(rows, other()), rows, kWarpBytes, barrier);
  }

  const cuda::AttentionParams& p_;
  const PrefixMap<C>& map_;
  const int rank_;
  const int which_;
  const int own_;                         // the first tile of a work tile whose probabilities it computes
  PackedPipelineState<C::kStages> ring_;  // stage of its next tile
  std::uint32_t number_;                  // number of its next tile, over all work tiles
  AttentionState<C> rows_;                // only its softmax_offsets are used
  std::uint32_t q_[kSteps][4];
};

// Recomputes work tiles of shared prefixes (prefix.cuh) tile by tile with a single warpgroup, if a row exceeds the
// rescale threshold or has no softmax_offset in the first tile.
//
// All rows see all keys of a work tile, so every tile is plain, and a tile's softmax overlaps P V of the previous tile.
// The arithmetic is prefill's: the same functions on the same fragments, in the same order.

// The coordinates of a thread's rows of a work tile, for rows that exist.
template <class C>
__device__ __forceinline__ ThreadRows prefix_thread_rows(const PrefixParams& params, const PrefixMap<C>& map,
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
__device__ __forceinline__ void store_prefix_rows(const PrefixParams& params, const ThreadRows& thread_rows,
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
  __device__ __forceinline__ PrefixConsumer(const PrefixParams& params, const PrefixMap<C>& map,
                                            PackedPipelineState<C::kStages> ring)
      : params_(params), p_(params.attention), map_(map), ring_(ring) {}

  __device__ __forceinline__ void process(const PrefixWorkTile& work_tile) {
    load_queries<C>(params_.attention, map_, work_tile.rows,
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

  // Computes probabilities from scores, and the thread's shares of their sums. Returns whether a row of the warp
  // exceeds the rescale threshold.
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

  const PrefixParams& params_;
  const cuda::AttentionParams& p_;
  const PrefixMap<C>& map_;
  PackedPipelineState<C::kStages> ring_;
  AttentionState<C> rows_;
  int tile_ = 0, end_ = 0;  // the tile whose probabilities are ready, and the end of the work tile
  float sum_[2] = {};       // Σ p of this thread's columns of the tile
  std::uint32_t probability_[C::kKeyTile / 16][4];
};

// The output warpgroup of the prefix kernel (prefix.cuh): adds P V of a prefix's tiles in order, whichever warpgroup or
// CTA has scored them.

// Holds acc and sum of 64 rows.
template <class C>
class PrefixOutputs {
 public:
  __device__ __forceinline__ PrefixOutputs(const PrefixParams& params, const PrefixMap<C>& map, int rank)
      : params_(params), map_(map), rank_(rank) {}

  __device__ __forceinline__ void process(const PrefixWorkTile& work_tile) {
    if constexpr (C::kSlices > 1) await_panels_of_queries();
    load_queries<C>(params_.attention, map_, work_tile.rows,
                    [&](int tile_row) { return coord_of(params_, map_, work_tile, tile_row); });
    named_arrive(kPrefixQueries, (1 + C::kScorers) * kWarpgroup);
    // done here since the warpgroup has to wait anyway
    const ThreadRows thread_rows = prefix_thread_rows(params_, map_, work_tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.l[half] = 0.0F;
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {  // keeps the registers defined; the first P V overwrites them
#pragma unroll
      for (int i = 0; i < 4; ++i) rows_.o[n][i] = 0.0F;
    }
#pragma unroll 1
    for (int tile = 0; tile < work_tile.tiles(); ++tile) {
      barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
      add_panel<0>(tile == 0);
      add_sums();
      add_panel<1>(false);
      ring_.advance();
      ++number_;
    }
    wgmma_wait<0>();
    pin(rows_.o);
    release_panel();
    release_values();
#pragma unroll 1
    for (int turn = work_tile.tiles(); turn < work_tile.turns<C>(); ++turn) skip_tiles();
    const float2 shift = load_pair(map_.shift(thread_of_warpgroup()));
    rows_.shift[0] = shift.x;
    rows_.shift[1] = shift.y;
    // otherwise the work tile has failed
    rows_.flags = AttentionState<C>::kOffsetSet | AttentionState<C>::kOffsetSet << 1;
    store_prefix_rows(params_, thread_rows, work_tile, rows_, rank_ * C::kDimV);
  }

  // The stage of the next work tile's first tile.
  __device__ PackedPipelineState<C::kStages> ring() const { return ring_; }

 private:
  // Waits until the peer CTA, too, has read the previous work tile's probabilities that share memory with Q. Every
  // panel has been used for the same number of tiles.
  __device__ __forceinline__ void await_panels_of_queries() const {
    constexpr std::uint32_t kTiles = PrefixMap<C>::kPanels / PrefixMap<C>::kTilePanels;
    static_assert(scoring_warpgroups<C>() % kTiles == 0);
    const std::uint32_t parity = (number_ / kTiles & 1U) ^ 1U;
#pragma unroll
    for (std::uint32_t i = 0; i < PrefixMap<C>::kTilePanels; ++i) {
      barrier_wait(map_.panel_empty(PrefixMap<C>::q_panel() + i), parity);
    }
  }

  using Panels = PipelineState<PrefixMap<C>::kPanels>;

  // Issues P V of a tile's panel. It first completes the previous panel and, with a tile's first panel, the previous
  // tile.
  template <int kPanel>
  __device__ __forceinline__ void add_panel(bool first) {
    barrier_wait(map_.panel_full(panel_.index), panel_.parity);
    const std::uint32_t p = warp_uniform(descriptor_low(map_.panel(panel_.index)));
    const std::uint32_t v = warp_uniform(descriptor_low(map_.v(ring_.stage()), cuda::panel_bytes(C::kKeyTile)));
    panel_.advance();
    pin(rows_.o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < panel_steps<C>(kPanel); ++step) {
      Wgmma<typename C::Element, C::kDimV>::sv(
          rows_.o, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>((4 * kPanel + step) * 16 * kPanelRowBytes >> 4)),
          step > 0 || !first);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (first) return;
    release_panel();
    if (kPanel == 0) release_values();
  }
  // Skips a turn without a tile, after all wgmma are complete.
  __device__ __forceinline__ void skip_tiles() {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      barrier_wait(map_.panel_full(panel_.index), panel_.parity);
      panel_.advance();
      __syncwarp();  // one lane arrives after all have waited
      release_panel();
    }
    release_values();
    ring_.advance();
    ++number_;
  }
  __device__ __forceinline__ void add_sums() {
    if (C::kSlices > 1 && rank_ != 0) return;  // the other CTA stores the sum
    const float2 sum = load_pair(map_.sums(number_, thread_of_warpgroup()));
    rows_.l[0] = __fadd_rn(rows_.l[0], sum.x);
    rows_.l[1] = __fadd_rn(rows_.l[1], sum.y);
    __syncwarp();  // one lane releases the panel, and these sums with it, after all have read
  }
  // Arrives at the CTA that writes the panel; in a pair both CTAs' output warpgroups do.
  __device__ __forceinline__ void release_panel() {
    const std::uint32_t panel_index = released_panel_.index;
    const std::uint32_t barrier = map_.panel_empty(panel_index);
    if (thread_of_cta() % 32 == 0) {
      if constexpr (C::kSlices > 1) {
        barrier_arrive_at(map_to_cta(barrier, PrefixMap<C>::writer_of(panel_index)));
      } else {
        barrier_arrive(barrier);
      }
    }
    released_panel_.advance();
  }
  __device__ __forceinline__ void release_values() {
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.v_empty(released_.stage()));
    released_.advance();
  }

  const PrefixParams& params_;
  const PrefixMap<C>& map_;
  const int rank_;
  PackedPipelineState<C::kStages> ring_, released_;  // V of the next tile, and the next stage to release
  Panels panel_, released_panel_;
  std::uint32_t number_ = 0;  // number of the next tile, over all work tiles
  AttentionState<C> rows_;
};

// Threads of a CTA: one output warpgroup, the scoring warpgroups, and one of which two warps load and the others exit.
// kPrefixWarps counts the warps that stay.
template <class C>
inline constexpr int kPrefixThreads = (2 + C::kScorers) * kWarpgroup;
template <class C>
inline constexpr int kPrefixWarps = (1 + C::kScorers) * kWarpgroup / 32 + 2;

// Registers of a thread by role. The scoring warpgroups release theirs when they are done.
template <class C>
struct PrefixRegisters {
  static constexpr int kOutputs = C::kSlices > 1 ? 112 : C::kScorers == 1 ? 208 : 176;
  static constexpr int kScores = C::kSlices > 1 ? 176 : C::kScorers == 1 ? 208 : 144;
  static constexpr int kFetch = C::kSlices > 1 ? 48 : 40;
  static constexpr int kWhole = 240;
  static constexpr int kLaunched = 65536 / kPrefixThreads<C> / 8 * 8;  // registers of a thread at launch
  static constexpr int kAll = kLaunched * (2 + C::kScorers);
  static_assert(kOutputs + C::kScorers * kScores + kFetch <= kAll);
  static_assert(kWhole + (1 + C::kScorers) * kFetch <= kAll);
  // Sums of two tiles are buffered: one tile's are read before those of the next but one are written. A pair buffers as
  // many sums as probabilities, which become free at the same time.
  static_assert(C::kScorers == 1 || C::kSlices > 1 || C::kStages % 2 == 0 || C::kPanels <= 3);
};

template <class C>
__device__ __forceinline__ void init_prefix_barriers(const PrefixMap<C>& map) {
  for (std::uint32_t i = 0; i < PrefixMap<C>::kPanels; ++i) {
    barrier_init(map.panel_full(i), kWarpgroup / 32);
    barrier_init(map.panel_empty(i), C::kSlices * kWarpgroup / 32);
  }
  // Every thread arrives and, from the other CTA of a pair, one lane of every warp.
  barrier_init(map.done(), (32 + C::kSlices - 1) * kPrefixWarps<C>);
  if constexpr (C::kSlices > 1) barrier_init(map.laid_out(), 32);
  init_decode_barriers<C>(map);
}

// Reinitializes the shared memory of a pair's first CTA to recompute work tiles. The K producer warp calls it when the
// CTA's other work is complete.
template <class C>
__device__ __forceinline__ void lay_out_whole(const PrefixParams& params, const PrefixMap<C>& before,
                                              const PrefixMap<typename C::Whole>& map) {
  if (elect_one()) {
#pragma unroll 1
    for (std::uint32_t i = 0; i < 4 * C::kStages; ++i) barrier_invalidate(before.k_full(i));
#pragma unroll 1
    for (std::uint32_t i = 0; i < 2 * C::kPanels; ++i) barrier_invalidate(before.panel_full(i));
    init_decode_barriers<typename C::Whole>(map);
    proxy_fence();
  }
  __syncwarp();
  collect_members<typename C::Whole>(params, map);
  barrier_arrive(before.laid_out());
}

template <class C>
__global__ void __launch_bounds__(kPrefixThreads<C>, 1) prefix_kernel(const __grid_constant__ PrefixParams params) {
  constexpr bool kPairs = C::kSlices > 1;
  using Whole = typename C::Whole;
  using Registers = PrefixRegisters<C>;
  const PrefixMap<C> map;
  const int rank = kPairs ? static_cast<int>(rank_in_cluster()) : 0;
  constexpr int kFetchWarp = (1 + C::kScorers) * kWarpgroup / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    init_prefix_barriers<C>(map);
    store_number(map.failed(), 0);
  }
  arrive_in_cluster<C, true>();  // warps that write to the peer CTA wait for this arrival of both
  if (warp == kFetchWarp) prefetch_metadata(params);
  cuda::pdl_wait();
  // The next launch waits before it reads what this one writes. What earlier launches have written is visible by now.
  cuda::pdl_launch_dependents();
  if (warp == kFetchWarp) collect_members<C>(params, map);
  __syncthreads();
  wait_for_cluster<C>();
  const ClusterWorkTiles work = cluster_work_tiles<C>();
  const auto each_work_tile = [&](const auto& of_map, auto&& visit) {
    const int work_tiles = load_number(of_map.work_tiles_before(params.prefixes.count));
#pragma unroll 1
    for (int n = work.first; n < work_tiles; n += work.step) visit(prefix_work_tile_of(params, of_map, n));
  };
  // Once all work tiles are complete, those of the peer CTA too, every thread knows whether one has failed, and no CTA
  // writes to one that has exited. Warps call this in different branches, where a barrier of the whole CTA is not
  // possible.
  const auto any_failed = [&] {
    if constexpr (kPairs) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_release_at(map_to_cta(map.done(), 1U - static_cast<std::uint32_t>(rank)));
    }
    barrier_arrive(map.done());
    if constexpr (kPairs) {
      barrier_acquire(map.done(), 0);
    } else {
      barrier_wait(map.done(), 0);
    }
    return load_number(map.failed()) != 0 && rank == 0;
  };
  // In a pair, tiles have a different layout for recomputing. The warps wait until one warp has initialized it.
  const PrefixMap<Whole> recompute_map;
  const auto await_layout = [&] {
    if constexpr (kPairs) barrier_wait(map.laid_out(), 0);
  };
  if (warp < kWarpgroup / 32) {
    change_registers<Registers::kOutputs, Registers::kLaunched>();
    PrefixOutputs<C> outputs(params, map, rank);
    each_work_tile(map, [&](const PrefixWorkTile& work_tile) { outputs.process(work_tile); });
    if (!any_failed()) return;
    reg_alloc<Registers::kWhole>();
    await_layout();
    PrefixConsumer<Whole> consumer(params, recompute_map, [&] {
      if constexpr (kPairs)
        return PackedPipelineState<Whole::kStages>();
      else
        return outputs.ring();
    }());
    each_work_tile(recompute_map, [&](const PrefixWorkTile& work_tile) { consumer.process(work_tile); });
  } else if (warp < kFetchWarp) {
    change_registers<Registers::kScores, Registers::kLaunched>();
    PrefixScorer<C> scorer(params, map, rank, warp / (kWarpgroup / 32) - 1);
    each_work_tile(map, [&](const PrefixWorkTile& work_tile) { scorer.process(work_tile); });
    if (!any_failed()) return;
    reg_dealloc<Registers::kFetch>();
  } else {
    reg_dealloc<Registers::kFetch>();
    const auto refetch = [&]<FetchedParts kParts>(TileProducer<C, kParts>& producer) {
      if constexpr (kPairs) {
        TileProducer<Whole, kParts> whole_producer(params, recompute_map);
        each_work_tile(recompute_map,
                       [&](const PrefixWorkTile& work_tile) { whole_producer.process(work_tile.decode_tile); });
      } else {
        each_work_tile(map, [&](const PrefixWorkTile& work_tile) { producer.process(work_tile.decode_tile); });
      }
    };
    if (warp == kFetchWarp) {
      TileProducer<C, FetchedParts::kKeys> producer(params, map);
      each_work_tile(map, [&](const PrefixWorkTile& work_tile) {
        producer.process(work_tile.decode_tile, 0, scored_tiles<C>(rank, work_tile.turns<C>()),
                         [&](int nth) { return work_tile.tile_at(scored_tile<C>(rank, nth)); });
      });
      if (!any_failed()) return;
      if constexpr (kPairs) lay_out_whole<C>(params, map, recompute_map);
      refetch(producer);
    } else if (warp == kFetchWarp + 1) {
      TileProducer<C, FetchedParts::kValues> producer(params, map, rank * C::kDimV);
      each_work_tile(map, [&](const PrefixWorkTile& work_tile) {
        producer.process(work_tile.decode_tile);
        producer.process(work_tile.decode_tile, work_tile.tiles(), work_tile.turns<C>(),
                         [&](int) { return work_tile.decode_tile.end - 1; });
      });
      if (!any_failed()) return;
      await_layout();
      refetch(producer);
    }
  }
}

}  // namespace ringattn::sm90
