// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a pair's CTA that scores every second tile, with the query rows in registers. A tile's
// probabilities go to the outputs of both CTAs. References and sums go from tile to tile, and so from CTA to CTA: the
// softmax_offsets as soon as the scores are there, so that the other CTA, which scores the next tile meanwhile, has
// them when it needs them; the sums while the tensor cores have the next tile's scores to do. What the other CTA gets
// early is sent by a warp of its own (cta_pair_send.cuh): a warp that sends waits for the network, and this one never
// has the time.
//
// The tile step is the fold's (fold/tile_step.cuh) but for when a row's softmax_offset moves: as soon as a score lies
// more than kFarAbove above it, which is known before the exponentials are taken, so no tile is done twice.
// AttentionState that don't see a tile of the work_tile have probabilities of 0 there, which change nothing.
#pragma once

#include "kernels/sm90/latent/cta_pair_map.cuh"
#include "kernels/sm90/latent/query_rows.cuh"
#include "kernels/sm90/latent/softmax_offsets.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

inline constexpr int kCtaPairScoreBarrier = 1;  // of the threads that score

template <class C>
class CtaPairScorer {
 public:
  __device__ __forceinline__ CtaPairScorer(const DecodeParams& params, const CtaPairMap& map)
      : params_(params), p_(params.attention), map_(map), other_(1U - map.rank) {}

  __device__ __forceinline__ void take(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    // The CTA's first keys are asked for behind its queries: all CTAs' keys take long to come.
    const auto arrive_producer = [&] {
      if (!begun_) named_arrive(kCtaPairQueryBarrier, kWarpgroup + 32);
      begun_ = true;
    };
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    if (static_cast<int>(tiles_ - tile) <= 0) arrive_producer();
    if (first == tiles_) return;
    if (static_cast<int>(tiles_ - tile) > 0) {
      const ThreadRows slots = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
      const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
      queries_.load(params_, work_tile, arrive_producer);
      const std::uint32_t begin = tile;
      float sum[2], factor[2];
      const auto add_last = [&] { add_sums(sum, factor, tile - 2, tile - 2 == first); };
#pragma unroll 1
      for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) {
        Scores s;
        multiply(s, tile, [&] {
          if (tile != begin) add_last();
        });
        const int number = work_tile.begin + static_cast<int>(tile - first);
        score(s, slots, tile, number, tile == first, number < plain.begin || number >= plain.end, sum, factor);
      }
      add_last();
    }
    ++work_tiles_;
  }

  // The sums behind the last tile of all, which nobody needs, may still be on their way here.
  __device__ __forceinline__ void await_last() const {
    if (tiles_ == 0 || ((tiles_ ^ map_.rank) & 1U) != 0) return;
    barrier_wait(map_.sums_full(), (tiles_ - 1) >> 1 & 1U);
  }

 private:
  using Scores = MlaScores;
  static constexpr int kHalfSteps = 4 * kCtaPairPanels;
  static constexpr int kEarlySteps = 8;

  // S = Q Kᵀ, part by part as it arrives. The tensor cores have the first products to do meanwhile().
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t tile, Meanwhile meanwhile) {
    const MlaPipelineState turn = cta_pair_pipeline_state(tile);
    barrier_wait(map_.half_full(0, turn.index), turn.parity);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kEarlySteps>(s, map_.half(0, turn.index));
    wgmma_commit();
    meanwhile();
    wgmma_fence();
    queries_.template multiply<kEarlySteps, kHalfSteps>(
        s, map_.half(0, turn.index) + kEarlySteps / 4 * CtaPairMap::kPanelBytes);
    barrier_wait(map_.half_full(1, turn.index), turn.parity);
    wgmma_fence();
    queries_.template multiply<kHalfSteps, 2 * kHalfSteps>(s, map_.half(1, turn.index));
    barrier_wait(map_.rope_full(turn.index), turn.parity);
    wgmma_fence();
    queries_.template multiply<2 * kHalfSteps, QueryRows<C>::kSteps>(s, map_.rope(turn.index));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.shared_empty(turn.index));
    __syncwarp();
  }

  // Scores of a tile with this number in the sequence become probabilities, which are handed over. `first`: of its
  // work_tile; `special`: not all rows see all of it.
  __device__ __forceinline__ void score(Scores& s, const ThreadRows& slots, std::uint32_t tile, int number, bool first,
                                        bool special, float (&sum)[2], float (&factor)[2]) const {
    see_scores<C>(p_, s, slots, number, special);
    float shift[2];
    move_offsets(s, tile, first, shift, factor);
    named_sync(kCtaPairScoreBarrier, kWarpgroup);  // all warps have done with the rotary keys
    exponentiate<C>(p_, shift, s, sum);
    MlaProbabilities probability;
    pack<C>(s, probability);
    send_probabilities_of_tile(probability, cta_pair_pipeline_state(tile));
  }

  // Behind the tile before, and so to behind this one. `factor`: of what was there before.
  __device__ __forceinline__ void move_offsets(const Scores& s, std::uint32_t tile, bool first, float (&shift)[2],
                                               float (&factor)[2]) const {
    float row_max[2];
    greatest_scores(p_, s, row_max);
    const MlaPipelineState turn = cta_pair_pipeline_state(tile);
    const MlaPipelineState before = cta_pair_pipeline_state(tile - 1);
    // Also at a work_tile's first tile, which needs none: so no CTA is a tile ahead of what the other one has read.
    if (tile > 0) barrier_wait(map_.softmax_offsets_full(false, before.index), before.parity);
    const int thread = thread_of_warpgroup();
    const float2 pair = load_pair(map_.softmax_offsets(false, before.index, thread));
    const float old[2] = {first ? -INFINITY : pair.x, first ? -INFINITY : pair.y};
    float softmax_offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Without the factor: the other CTA waits for this.
      softmax_offset[half] = offset_after(old[half], row_max[half]);
      shift[half] = softmax_offset[half] == -INFINITY ? 0.0F : -softmax_offset[half];
    }
    if (thread % 4 == 0)
      store_pair(map_.softmax_offsets(true, turn.index, thread), softmax_offset[0], softmax_offset[1]);
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(map_.softmax_offsets_full(true, turn.index));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = factor_between(old[half], softmax_offset[half]);
  }

  // Probabilities to the outputs of both CTAs. Their place here had the tile's rotary keys, their place there had the
  // probabilities of the CTA's tile before the last one: both are free, as the tile came into a place that all outputs
  // had given back.
  __device__ __forceinline__ void send_probabilities_of_tile(const MlaProbabilities& probability,
                                                             const MlaPipelineState& turn) const {
    store_probabilities(map_.probabilities(true, turn.index), probability);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.probabilities_full(true, turn.index));
    __syncwarp();
  }

  // l behind this tile, from l behind the tile before; the last one's is the work_tile's.
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
    dsmem_store_pair_async(in_cta(map_.sums(thread), other_), barrier, l[0], l[1]);
    if (tile + 1 == tiles_) send_ends(l);
  }

  __device__ __forceinline__ void send_ends(const float (&l)[2]) const {
    const int lane = thread_of_cta() % 32;
    const float sums[2] = {sum_of_quad(l[0]), sum_of_quad(l[1])};
    const std::uint32_t place =
        MlaPipelineState::of(work_tiles_).index;  // free: its tiles come only when it is (cta_pair_producer.cuh)
    const std::uint32_t barrier = in_cta(map_.ends_full(place), other_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 16 * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 != 0) continue;
      const std::uint32_t end = map_.end(place, tile_row_of_thread() + 8 * half);
      cuda::store_shared(end, __float_as_uint(sums[half]));
      dsmem_store_async(in_cta(end, other_), barrier, __float_as_int(sums[half]));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(map_.ends_full(place));
  }

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const CtaPairMap& map_;
  const std::uint32_t other_;     // rank of the other CTA
  std::uint32_t tiles_ = 0;       // of all work_tiles so far
  std::uint32_t work_tiles_ = 0;  // that have tiles
  bool begun_ = false;
  QueryRows<C> queries_;
};

}  // namespace ringattn::sm90
