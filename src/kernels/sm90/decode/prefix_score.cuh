// SPDX-License-Identifier: Apache-2.0
// The warpgroups that score tiles of shared prefixes (prefix.cuh) and write the probabilities to where those with
// outputs read them. They go through every work_tile in turns, and each has as many: so whose turn is next, and which
// places are whose, never hangs on how many tiles work_tiles had before. Where a work_tile has fewer tiles, the last
// one is scored again.
#pragma once

#include "kernels/sm90/decode/prefix_work_tiles.cuh"
#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/matrix.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace ringattn::sm90 {

// The nth tile that a CTA's warpgroups score of a work_tile's. The second CTA of a pair scores the first one, too, for
// its softmax_offsets alone.
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
      : p_(params.attention),
        map_(map),
        rank_(rank),
        which_(which),
        own_(rank + C::kSlices * which),
        number_(static_cast<std::uint32_t>(own_)) {
    if (which_ != 0) ring_.advance();
  }

  __device__ __forceinline__ void take(const PrefixWorkTile& work_tile) {
    load_queries();
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.shift[half] = 0.0F;
    constexpr int kStep = scoring_warpgroups<C>();
    static_assert(kTilesPerKvSplit % kStep == 0);
    const int turns = work_tile.turns<C>();
    // A warpgroup waits for a panel that has been read only when it knows of its turn before the last one: it has
    // filled that address, or one behind it, itself.
    static_assert(C::kSlices == 1 || PrefixMap<C>::kPanels >= kStep * PrefixMap<C>::kTilePanels);
    const int first = which_ == 0 ? 0 : own_;
    if (rank_ != 0 && which_ != 0) ring_.advance();  // the other warpgroup scores the work_tile's first tile
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
      if (tile == first) take_offsets(s);
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
  // A stage of keys goes from one warpgroup to the other. So none waits for it before the other one has seen it full,
  // whose turn would pass for its own. (In one CTA, the places of probabilities see to that.)
  static constexpr bool kAlternates = C::kSlices > 1;
  static_assert(!kAlternates || C::kScorers == 2);
  static constexpr float kMax = kRescaleThreshold<typename C::Element>;

  // Query rows as fragments: the address where they lie is then the probabilities'.
  __device__ __forceinline__ void load_queries() {
    named_sync(kPrefixQueries, (1 + C::kScorers) * kWarpgroup);
    const std::uint32_t q = map_.q() + offset_of_lane();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) cuda::load_matrix(q_[step], cuda::at_columns<kQueryTile>(q, step));
    named_sync(kPrefixQueriesRead, C::kScorers * kWarpgroup);
  }
  // In a panel, of this lane's row and chunk of a 16 × 16 piece that the warp loads or stores.
  __device__ __forceinline__ static std::uint32_t offset_of_lane() {
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

  // Of a work_tile's first tile, by the warpgroup that scores it; the other one is told.
  __device__ __forceinline__ void take_offsets(const Scores& s) {
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
      dsmem_store(in_cta(map_.failed(), 0), 1);  // the first CTA of a pair folds again
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
      if (panel == 0 && adds_up()) store_pair(map_.sums(number_, thread_of_warpgroup()), sum[0], sum[1]);
    }
    // Once for both: the fence waits until what has been written is there.
    proxy_fence();
    __syncwarp();
    if (!adds_up()) {
      dsmem_store_pair_async(in_cta(map_.sums(number_, thread_of_warpgroup()), 0),
                             in_cta(map_.panel_full(turn_of(0).index), 0), sum[0], sum[1]);
    }
    if (!elect_one()) return;
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      const std::uint32_t address = turn_of(panel).index;
      barrier_arrive(map_.panel_full(address));
      if constexpr (C::kSlices > 1) send_rows(address, panel);
    }
  }
  // Whether this CTA's outputs add sums up: a pair's first one does.
  __device__ __forceinline__ bool adds_up() const { return C::kSlices == 1 || rank_ == 0; }
  // The warp's rows of a panel to the other CTA, which has the same address free: its outputs have said so, too.
  __device__ __forceinline__ void send_rows(std::uint32_t address, int panel) const {
    constexpr int kWarpBytes = 16 * kPanelRowBytes;
    const std::uint32_t rows =
        map_.panel(address) + static_cast<std::uint32_t>(thread_of_warpgroup() / 32 * kWarpBytes);
    const std::uint32_t barrier = in_cta(map_.panel_full(address), other());
    const int sums = panel == 0 && !adds_up() ? 32 * 8 : 0;
    barrier_arrive_expect_at(barrier, kWarpBytes + sums);
    dsmem_copy_expected(in_cta(rows, other()), rows, kWarpBytes, barrier);
  }

  const cuda::AttentionParams& p_;
  const PrefixMap<C>& map_;
  const int rank_;
  const int which_;
  const int own_;                         // the first of a work_tile's tiles whose probabilities it makes
  PackedPipelineState<C::kStages> ring_;  // of the next tile of its own
  std::uint32_t number_;                  // of the same, of all work_tiles'
  AttentionState<C> rows_;                // its softmax_offsets
  std::uint32_t q_[kSteps][4];
};

}  // namespace ringattn::sm90
