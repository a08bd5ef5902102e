// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a pair's CTA that scores every second tile, with the query rows in registers. A tile's
// probabilities go to the outputs of both CTAs. References and sums go from tile to tile, and so from CTA to CTA: the
// references as soon as the scores are there, so that the other CTA, which scores the next tile meanwhile, has them
// when it needs them; the sums while the tensor cores have the next tile's scores to do. What the other CTA gets early
// is sent by a warp of its own (pair_send.cuh): a warp that sends waits for the network, and this one never has the
// time.
//
// The tile step is the fold's (fold/tile_step.cuh) but for when a row's reference moves: as soon as a score lies more
// than kFarAbove above it, which is known before the exponentials are taken, so no tile is done twice. Rows that don't
// see a tile of the unit have probabilities of 0 there, which change nothing.
#pragma once

#include "kernels/sm90/latent/pair_map.cuh"
#include "kernels/sm90/latent/query_rows.cuh"
#include "kernels/sm90/latent/references.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

inline constexpr int kPairScoreBarrier = 1;  // of the threads that score

template <class C>
class PairScorer {
 public:
  __device__ __forceinline__ PairScorer(const DecodeParams& params, const PairMap& map)
      : params_(params), p_(params.fold), map_(map), other_(1U - map.rank) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    // The CTA's first keys are asked for behind its queries: all CTAs' keys take long to come.
    const auto tell_fetcher = [&] {
      if (!begun_) named_arrive(kPairQueryBarrier, kWarpgroup + 32);
      begun_ = true;
    };
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    if (static_cast<int>(tiles_ - tile) <= 0) tell_fetcher();
    if (first == tiles_) return;
    if (static_cast<int>(tiles_ - tile) > 0) {
      const DecodeSlots slots = slots_of<C>(params_, unit, slot_of_thread());
      const BasicTileRange<int> plain = plain_tiles<C>(params_, unit);
      queries_.load(params_, unit, tell_fetcher);
      const std::uint32_t begin = tile;
      float sum[2], factor[2];
      const auto add_last = [&] { add_sums(sum, factor, tile - 2, tile - 2 == first); };
#pragma unroll 1
      for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) {
        Scores s;
        multiply(s, tile, [&] {
          if (tile != begin) add_last();
        });
        const int number = unit.begin + static_cast<int>(tile - first);
        score(s, slots, tile, number, tile == first, number < plain.begin || number >= plain.end, sum, factor);
      }
      add_last();
    }
    ++units_;
  }

  // The sums behind the last tile of all, which nobody needs, may still be on their way here.
  __device__ __forceinline__ void await_last() const {
    if (tiles_ == 0 || ((tiles_ ^ map_.rank) & 1U) != 0) return;
    barrier_wait(map_.sums_full(), (tiles_ - 1) >> 1 & 1U);
  }

 private:
  using Scores = LatentScores;
  static constexpr int kHalfSteps = 4 * kPairPanels;
  static constexpr int kEarlySteps = 8;

  // S = Q Kᵀ, part by part as it arrives. The tensor cores have the first products to do meanwhile().
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t tile, Meanwhile meanwhile) {
    const LatentTurn turn = pair_turn(tile);
    barrier_wait(map_.half_full(0, turn.place), turn.parity);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kEarlySteps>(s, map_.half(0, turn.place));
    wgmma_commit();
    meanwhile();
    wgmma_fence();
    queries_.template multiply<kEarlySteps, kHalfSteps>(
        s, map_.half(0, turn.place) + kEarlySteps / 4 * PairMap::kPanelBytes);
    barrier_wait(map_.half_full(1, turn.place), turn.parity);
    wgmma_fence();
    queries_.template multiply<kHalfSteps, 2 * kHalfSteps>(s, map_.half(1, turn.place));
    barrier_wait(map_.rope_full(turn.place), turn.parity);
    wgmma_fence();
    queries_.template multiply<2 * kHalfSteps, QueryRows<C>::kSteps>(s, map_.rope(turn.place));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.shared_empty(turn.place));
    __syncwarp();
  }

  // Scores of a tile with this number in the sequence become probabilities, which are handed over. `first`: of its
  // unit; `special`: not all rows see all of it.
  __device__ __forceinline__ void score(Scores& s, const DecodeSlots& slots, std::uint32_t tile, int number, bool first,
                                        bool special, float (&sum)[2], float (&factor)[2]) const {
    see_scores<C>(p_, s, slots, number, special);
    float shift[2];
    move_references(s, tile, first, shift, factor);
    named_sync(kPairScoreBarrier, kWarpgroup);  // all warps have done with the rotary keys
    exponentiate<C>(p_, shift, s, sum);
    LatentWeights probability;
    pack<C>(s, probability);
    hand_over(probability, pair_turn(tile));
  }

  // Behind the tile before, and so to behind this one. `factor`: of what was there before.
  __device__ __forceinline__ void move_references(const Scores& s, std::uint32_t tile, bool first, float (&shift)[2],
                                                  float (&factor)[2]) const {
    float most[2];
    greatest_scores(p_, s, most);
    const LatentTurn turn = pair_turn(tile);
    const LatentTurn before = pair_turn(tile - 1);
    // Also at a unit's first tile, which needs none: so no CTA is a tile ahead of what the other one has read.
    if (tile > 0) barrier_wait(map_.references_full(false, before.place), before.parity);
    const int thread = thread_of_warpgroup();
    const float2 pair = load_pair(map_.references(false, before.place, thread));
    const float old[2] = {first ? -INFINITY : pair.x, first ? -INFINITY : pair.y};
    float reference[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Without the factor: the other CTA waits for this.
      reference[half] = reference_behind(old[half], most[half]);
      shift[half] = reference[half] == -INFINITY ? 0.0F : -reference[half];
    }
    if (thread % 4 == 0) store_pair(map_.references(true, turn.place, thread), reference[0], reference[1]);
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(map_.references_full(true, turn.place));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = factor_between(old[half], reference[half]);
  }

  // Probabilities to the outputs of both CTAs. Their place here had the tile's rotary keys, their place there had the
  // probabilities of the CTA's tile before the last one: both are free, as the tile came into a place that all outputs
  // had given back.
  __device__ __forceinline__ void hand_over(const LatentWeights& probability, const LatentTurn& turn) const {
    store_weights(map_.weights(true, turn.place), probability);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.weights_full(true, turn.place));
    __syncwarp();
  }

  // l behind this tile, from l behind the tile before; the last one's is the unit's.
  __device__ __forceinline__ void add_sums(const float (&sum)[2], const float (&factor)[2], std::uint32_t tile,
                                           bool first) {
    const int lane = thread_of_cta() % 32;
    const int thread = thread_of_warpgroup();
    if (tile > 0) barrier_wait(map_.sums_full(), (tile - 1) >> 1 & 1U);
    const float2 before = first ? float2{0.0F, 0.0F} : load_pair(map_.sums(thread));
    const float l[2] = {__fadd_rn(__fmul_rn(before.x, factor[0]), sum[0]),
                        __fadd_rn(__fmul_rn(before.y, factor[1]), sum[1])};
    const std::uint32_t barrier = in_cta(map_.sums_full(), other_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 32 * 8);
    __syncwarp();
    send_pair(in_cta(map_.sums(thread), other_), barrier, l[0], l[1]);
    if (tile + 1 == tiles_) tell_ends(l);
  }

  __device__ __forceinline__ void tell_ends(const float (&l)[2]) const {
    const int lane = thread_of_cta() % 32;
    const float sums[2] = {sum_of_quad(l[0]), sum_of_quad(l[1])};
    const std::uint32_t place = LatentTurn::of(units_).place;  // free: its tiles come only when it is (pair_fetch.cuh)
    const std::uint32_t barrier = in_cta(map_.ends_full(place), other_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 16 * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 != 0) continue;
      const std::uint32_t end = map_.end(place, slot_of_thread() + 8 * half);
      cuda::store_shared(end, __float_as_uint(sums[half]));
      send_number(in_cta(end, other_), barrier, __float_as_int(sums[half]));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(map_.ends_full(place));
  }

  const DecodeParams& params_;
  const cuda::FoldParams& p_;
  const PairMap& map_;
  const std::uint32_t other_;  // rank of the other CTA
  std::uint32_t tiles_ = 0;    // of all units so far
  std::uint32_t units_ = 0;    // that have tiles
  bool begun_ = false;
  QueryRows<C> queries_;
};

}  // namespace ringattn::sm90
