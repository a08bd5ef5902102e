// SPDX-License-Identifier: Apache-2.0
// The scoring warpgroups of the prefix kernel (prefix.cuh), which write probabilities to shared memory for the output
// warpgroup. They have the same number of turns in every work tile, so turns and panels never depend on how many tiles
// earlier work tiles had. If a work tile has fewer tiles than turns, its last tile is scored again.
#pragma once

#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/decode/sm90/prefix_work_tiles.cuh"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

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
  __device__ __forceinline__ PrefixScorer(const DecodeParams& params, const PrefixMap<C>& map, int rank, int which)
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

}  // namespace ringattn::sm90
