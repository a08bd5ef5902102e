// SPDX-License-Identifier: Apache-2.0
// The scoring warpgroup of a CTA in a pair. It scores every second tile, with the queries in registers, and passes the
// probabilities to the output warpgroups of both CTAs. Softmax offsets and row sums pass from tile to tile, and so from
// CTA to CTA. Offsets are passed as soon as the scores are known, so that the other CTA, which scores the next tile
// meanwhile, has them in time. Sums are passed during the next tile's MMAs. DSMEM stores stall the issuing warp, so a
// dedicated warp sends what the other CTA needs early (cta_pair_send.cuh).
//
// The tile step is that of sm90_attention, except for when the softmax offset of a row moves: as soon as a score
// exceeds it by more than kMlaRescaleThreshold. This is known before the exponentials are computed, so no tile is
// recomputed. Rows that do not see a tile of the work tile have probabilities 0 there, which changes nothing.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/mla/sm90/cta_pair_map.cuh"
#include "kernels/mla/sm90/query_rows.cuh"
#include "kernels/mla/sm90/softmax_offsets.cuh"

namespace ringattn::sm90 {

inline constexpr int kCtaPairScoreBarrier = 1;  // scoring warpgroup

template <class C>
class CtaPairScorer {
 public:
  __device__ __forceinline__ CtaPairScorer(const DecodeParams& params, const CtaPairMap& map)
      : params_(params), p_(params.attention), map_(map), peer_(1U - map.rank) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    // The CTA's first keys are loaded after its queries: with the loads of all CTAs in flight, they arrive late.
    const auto arrive_producer = [&] {
      if (!started_) named_arrive(kCtaPairQueryBarrier, kWarpgroup + 32);
      started_ = true;
    };
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    if (static_cast<int>(tiles_ - tile) <= 0) arrive_producer();
    if (first == tiles_) return;
    if (static_cast<int>(tiles_ - tile) > 0) {
      const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
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
        score(s, thread_rows, tile, number, tile == first, number < plain.begin || number >= plain.end, sum, factor);
      }
      add_last();
    }
    ++work_tiles_;
  }

  // Waits for the sums after the last tile. They are not used, but may still be in flight to this CTA.
  __device__ __forceinline__ void await_last() const {
    if (tiles_ == 0 || ((tiles_ ^ map_.rank) & 1U) != 0) return;
    barrier_wait(map_.sums_full(), (tiles_ - 1) >> 1 & 1U);
  }

 private:
  using Scores = MlaScores;
  static constexpr int kHalfSteps = 4 * kCtaPairPanels;
  static constexpr int kEarlySteps = 8;

  // S = Q Kᵀ, each column part when it has landed. meanwhile() runs during the first kEarlySteps MMAs.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t tile, Meanwhile meanwhile) {
    const MlaPipelineState state = cta_pair_pipeline_state(tile);
    barrier_wait(map_.half_full(0, state.index), state.parity);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kEarlySteps>(s, map_.half(0, state.index));
    wgmma_commit();
    meanwhile();
    wgmma_fence();
    queries_.template multiply<kEarlySteps, kHalfSteps>(
        s, map_.half(0, state.index) + kEarlySteps / 4 * CtaPairMap::kPanelBytes);
    barrier_wait(map_.half_full(1, state.index), state.parity);
    wgmma_fence();
    queries_.template multiply<kHalfSteps, 2 * kHalfSteps>(s, map_.half(1, state.index));
    barrier_wait(map_.rope_full(state.index), state.parity);
    wgmma_fence();
    queries_.template multiply<2 * kHalfSteps, QueryRows<C>::kSteps>(s, map_.rope(state.index));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.shared_empty(state.index));
    __syncwarp();
  }

  // Computes probabilities from scores and stores them for the sender. `number`: the tile's index in its sequence.
  // `first`: of the work tile. `special`: not all rows see all keys of the tile.
  __device__ __forceinline__ void score(Scores& s, const ThreadRows& thread_rows, std::uint32_t tile, int number,
                                        bool first, bool special, float (&sum)[2], float (&factor)[2]) const {
    scale_and_mask<C>(p_, s, thread_rows, number, special);
    float shift[2];
    update_offsets(s, tile, first, shift, factor);
    // All warps have read the rotary keys, which the probabilities overwrite.
    named_sync(kCtaPairScoreBarrier, kWarpgroup);
    exponentiate<C>(p_, shift, s, sum);
    MlaProbabilities probability;
    pack<C>(s, probability);
    send_probabilities_of_tile(probability, cta_pair_pipeline_state(tile));
  }

  // Updates the softmax offsets with this tile. `factor`: rescales the sums of earlier tiles.
  __device__ __forceinline__ void update_offsets(const Scores& s, std::uint32_t tile, bool first, float (&shift)[2],
                                                 float (&factor)[2]) const {
    float row_max[2];
    max_scores(p_, s, row_max);
    const MlaPipelineState state = cta_pair_pipeline_state(tile);
    const MlaPipelineState before = cta_pair_pipeline_state(tile - 1);
    // Waits also at a work tile's first tile, which needs no offset: so no CTA is a tile ahead of what the other has
    // read.
    if (tile > 0) barrier_wait(map_.softmax_offsets_full(false, before.index), before.parity);
    const int thread = thread_of_warpgroup();
    const float2 pair = load_pair(map_.softmax_offsets(false, before.index, thread));
    const float old[2] = {first ? -INFINITY : pair.x, first ? -INFINITY : pair.y};
    float softmax_offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The offset is stored before the factor is computed, as the other CTA waits for it.
      softmax_offset[half] = offset_after(old[half], row_max[half]);
      shift[half] = softmax_offset[half] == -INFINITY ? 0.0F : -softmax_offset[half];
    }
    if (thread % 4 == 0)
      store_pair(map_.softmax_offsets(true, state.index, thread), softmax_offset[0], softmax_offset[1]);
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(map_.softmax_offsets_full(true, state.index));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = factor_between(old[half], softmax_offset[half]);
  }

  // Stores probabilities for the output warpgroups of both CTAs. They overwrite the tile's rotary keys here, and in the
  // other CTA the probabilities of this CTA's tile before the last. Both are free, as the tile was loaded into a stage
  // that all output warpgroups had released.
  __device__ __forceinline__ void send_probabilities_of_tile(const MlaProbabilities& probability,
                                                             const MlaPipelineState& state) const {
    store_probabilities(map_.probabilities(true, state.index), probability);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.probabilities_full(true, state.index));
    __syncwarp();
  }

  // Row sums after this tile, from those after the previous tile. After the last tile, they are the work tile's sums.
  __device__ __forceinline__ void add_sums(const float (&sum)[2], const float (&factor)[2], std::uint32_t tile,
                                           bool first) {
    const int lane = thread_of_cta() % 32;
    const int thread = thread_of_warpgroup();
    if (tile > 0) barrier_wait(map_.sums_full(), (tile - 1) >> 1 & 1U);
    const float2 before = first ? float2{0.0F, 0.0F} : load_pair(map_.sums(thread));
    const float l[2] = {__fadd_rn(__fmul_rn(before.x, factor[0]), sum[0]),
                        __fadd_rn(__fmul_rn(before.y, factor[1]), sum[1])};
    const std::uint32_t barrier = map_to_cta(map_.sums_full(), peer_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 32 * 8);
    __syncwarp();
    dsmem_store_pair_async(map_to_cta(map_.sums(thread), peer_), barrier, l[0], l[1]);
    if (tile + 1 == tiles_) send_final_sums(l);
  }

  __device__ __forceinline__ void send_final_sums(const float (&l)[2]) const {
    const int lane = thread_of_cta() % 32;
    const float sums[2] = {sum_of_quad(l[0]), sum_of_quad(l[1])};
    const std::uint32_t stage =
        MlaPipelineState::of(work_tiles_).index;  // empty: the producer has waited for it (cta_pair_producer.cuh)
    const std::uint32_t barrier = map_to_cta(map_.final_sums_full(stage), peer_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 16 * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 != 0) continue;
      const std::uint32_t final_sum = map_.final_sum(stage, tile_row_of_thread() + 8 * half);
      cuda::store_shared(final_sum, __float_as_uint(sums[half]));
      dsmem_store_async(map_to_cta(final_sum, peer_), barrier, __float_as_int(sums[half]));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(map_.final_sums_full(stage));
  }

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const CtaPairMap& map_;
  const std::uint32_t peer_;      // rank of the other CTA
  std::uint32_t tiles_ = 0;       // over all work tiles so far
  std::uint32_t work_tiles_ = 0;  // non-empty work tiles so far
  bool started_ = false;
  QueryRows<C> queries_;
};

}  // namespace ringattn::sm90
