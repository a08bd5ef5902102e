// SPDX-License-Identifier: Apache-2.0
// The warpgroups that score tiles of shared prefixes (prefix.cuh) and write the probabilities to where those with
// outputs read them. They go through every unit in turns, and each has as many: so whose turn is next, and which places
// are whose, never hangs on how many tiles units had before. Where a unit has fewer tiles, the last one is scored
// again.
#pragma once

#include "kernels/sm90/decode/prefix_units.cuh"
#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/matrix.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace ringattn::sm90 {

// The nth tile that a CTA's warpgroups score of a unit's. The second CTA of a pair scores the first one, too, for its
// references alone.
template <class C>
__device__ __forceinline__ int scored_tile(int rank, int nth) {
  return max(C::kSlices * nth - rank, 0);
}
template <class C>
__device__ __forceinline__ int scored_tiles(int rank, int turns) {
  return turns / C::kSlices + (C::kSlices == 1 || rank == 0 ? 0 : 1);
}

// One of the warpgroups that score: every kScorers-th of the CTA's own tiles, from the one with number `which` on.
template <class C>
class PrefixScorer {
 public:
  __device__ __forceinline__ PrefixScorer(const DecodeParams& params, const PrefixMap<C>& map, int rank, int which)
      : p_(params.fold),
        map_(map),
        rank_(rank),
        which_(which),
        own_(rank + C::kSlices * which),
        number_(static_cast<std::uint32_t>(own_)) {
    if (which_ != 0) ring_.advance();
  }

  __device__ __forceinline__ void take(const PrefixUnit& unit) {
    load_queries();
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.shift[half] = 0.0F;
    constexpr int kStep = scoring_warpgroups<C>();
    static_assert(kGroupTiles % kStep == 0);
    const int turns = unit.turns<C>();
    // A warpgroup waits for a panel that has been read only when it knows of its turn before the last one: it has
    // filled that place, or one behind it, itself.
    static_assert(C::kSlices == 1 || PrefixMap<C>::kPanels >= kStep * PrefixMap<C>::kTilePanels);
    const int first = which_ == 0 ? 0 : own_;
    if (rank_ != 0 && which_ != 0) ring_.advance();  // the other warpgroup scores the unit's first tile
#pragma unroll 1
    for (int tile = first; tile < turns;) {
      Scores s;
      if (kTakesTurns && (which_ != 0 || tile > own_)) named_sync(kPrefixTurn + which_, 2 * kWarpgroup);
      barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
      multiply(s, map_.k(ring_.stage()));
      if (kTakesTurns && tile >= own_ && (which_ == 0 || tile + kStep < turns)) {
        named_arrive(kPrefixTurn + 1 - which_, 2 * kWarpgroup);
      }
      wgmma_wait<0>();
      pin(s);
      if (thread_of_cta() % 32 == 0) barrier_arrive(map_.k_empty(ring_.stage()));
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (tile == first) take_references(s);
      if (C::kSlices > 1 && tile < own_) {
        tile = own_;
        ring_.advance();
        continue;
      }
      float sum[2];
      exponentiate<C>(p_, rows_.shift, s, sum);
      if (sum[0] > kMost || sum[1] > kMost) mark_failed();
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
  // A stage of keys goes from one warpgroup to the other. So none waits for it before the other one has seen it full,
  // whose turn would pass for its own. (In one CTA, the places of probabilities see to that.)
  static constexpr bool kTakesTurns = C::kSlices > 1;
  static_assert(!kTakesTurns || C::kScorers == 2);
  static constexpr float kMost = kOutgrown<typename C::Element>;

  // Query rows as fragments: the place where they lie is then the probabilities'.
  __device__ __forceinline__ void load_queries() {
    named_sync(kPrefixQueries, (1 + C::kScorers) * kWarpgroup);
    const std::uint32_t q = map_.q() + place_of_lane();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) cuda::load_matrix(q_[step], cuda::at_columns<kQueryTile>(q, step));
    named_sync(kPrefixQueriesRead, C::kScorers * kWarpgroup);
  }
  // In a panel, of this lane's row and chunk of a 16 × 16 piece that the warp loads or stores.
  __device__ __forceinline__ static std::uint32_t place_of_lane() {
    const int lane = thread_of_cta() % 32;
    return cuda::swizzled(thread_of_warpgroup() / 32 * 16 + lane % 16, lane / 16);
  }

  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t k_tile) const {
    const std::uint32_t k = of_warp(descriptor_low(k_tile));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto at = static_cast<std::uint32_t>((step / 4 * cuda::panel_bytes(C::kKeyTile) + step % 4 * 32) >> 4);
      Wgmma<typename C::Element, C::kKeyTile>::rk(s, q_[step], descriptor(k + at), step > 0);
    }
    wgmma_commit();
  }

  // Of a unit's first tile, by the warpgroup that scores it; the other one is told.
  __device__ __forceinline__ void take_references(const Scores& s) {
    const std::uint32_t place = map_.shift(thread_of_warpgroup());
    if (which_ == 0) {
      settle<C>(p_, rows_, s);
      if (!rows_.seen(0) || !rows_.seen(1)) mark_failed();
      store_pair(place, rows_.shift[0], rows_.shift[1]);
      if (C::kScorers > 1) named_arrive(kPrefixReferences, C::kScorers * kWarpgroup);
    } else {
      named_sync(kPrefixReferences, C::kScorers * kWarpgroup);
      const float2 shift = load_pair(place);
      rows_.shift[0] = shift.x;
      rows_.shift[1] = shift.y;
    }
  }
  __device__ __forceinline__ void mark_failed() const {
    if constexpr (C::kSlices > 1) {
      store_number_at(in_cta(map_.failed(), 0), 1);  // the first CTA of a pair folds again
    } else {
      store_number(map_.failed(), 1);
    }
  }
  // Of a pair's CTAs, the one that this one is not.
  __device__ __forceinline__ std::uint32_t other() const { return static_cast<std::uint32_t>(1 - rank_); }

  __device__ __forceinline__ void send(const Scores& s, const float (&sum)[2]) const {
    std::uint32_t probability[C::kKeyTile / 16][4];
    pack<C>(s, probability);
    const auto turn_of = [&](int panel) {
      return Turn<PrefixMap<C>::kPanels>(number_ * PrefixMap<C>::kTilePanels + static_cast<std::uint32_t>(panel));
    };
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      const auto turn = turn_of(panel);
      barrier_wait(map_.panel_empty(turn.place), turn.parity ^ 1U);
      const std::uint32_t to = map_.panel(turn.place) + place_of_lane();
#pragma unroll
      for (int step = 0; step < panel_steps<C>(panel); ++step) {
        store_matrix(cuda::at_columns<kQueryTile>(to, step), probability[4 * panel + step]);
      }
      if (panel == 0 && adds_up()) store_pair(map_.sums(number_, thread_of_warpgroup()), sum[0], sum[1]);
    }
    // Once for both: the fence waits until what has been written is there.
    proxy_fence();
    __syncwarp();
    if (!adds_up()) {
      send_pair(in_cta(map_.sums(number_, thread_of_warpgroup()), 0), in_cta(map_.panel_full(turn_of(0).place), 0),
                sum[0], sum[1]);
    }
    if (!one_of_warp()) return;
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      const std::uint32_t place = turn_of(panel).place;
      barrier_arrive(map_.panel_full(place));
      if constexpr (C::kSlices > 1) send_rows(place, panel);
    }
  }
  // Whether this CTA's outputs add sums up: a pair's first one does.
  __device__ __forceinline__ bool adds_up() const { return C::kSlices == 1 || rank_ == 0; }
  // The warp's rows of a panel to the other CTA, which has the same place free: its outputs have said so, too.
  __device__ __forceinline__ void send_rows(std::uint32_t place, int panel) const {
    constexpr int kWarpBytes = 16 * kPanelRowBytes;
    const std::uint32_t rows = map_.panel(place) + static_cast<std::uint32_t>(thread_of_warpgroup() / 32 * kWarpBytes);
    const std::uint32_t barrier = in_cta(map_.panel_full(place), other());
    const int sums = panel == 0 && !adds_up() ? 32 * 8 : 0;
    barrier_arrive_expect_at(barrier, kWarpBytes + sums);
    send_told_bytes(in_cta(rows, other()), rows, kWarpBytes, barrier);
  }

  const cuda::FoldParams& p_;
  const PrefixMap<C>& map_;
  const int rank_;
  const int which_;
  const int own_;                // the first of a unit's tiles whose probabilities it makes
  RingCursor<C::kStages> ring_;  // of the next tile of its own
  std::uint32_t number_;         // of the same, of all units'
  Rows<C> rows_;                 // its references
  std::uint32_t q_[kSteps][4];
};

}  // namespace ringattn::sm90
