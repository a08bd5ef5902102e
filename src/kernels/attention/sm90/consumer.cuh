// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup. In each Q stage it computes its head work tile, 64 query rows of one head, over its part of the
// GQA-packed tile's KV loop, and skips the other tiles. During its softmax the tensor cores work for the other
// warpgroups, and with intra-warpgroup overlap (C::kOverlaps) for its own previous tile.
//
// There are two code paths for a tile. Most tiles are plain: every row sees every key and has its softmax_offset.
// Special tiles mask scores, set softmax_offsets, begin a KV split, or release a Q stage. HeadWorkTile::stop() says
// where they come.
#pragma once

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/row_state.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/sm90/cluster.cuh"

namespace ringattn::sm90 {

template <class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const HopperParams& params, const SharedMap<C>& map)
      : params_(params), p_(params.attention), map_(map) {
    rows_.flags = thread_of_warpgroup() < C::kClusterCtas ? AttentionState<C>::kLeader : 0U;
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      head_tile_ = acquire_q_stage();
      if (head_tile_.kv_loop() == kNoMoreWork) break;
      begin_rows<C>(p_, head_tile_, rows_);
      skip_tiles(head_tile_.begin());
      tiles_left_ = head_tile_.end() - head_tile_.begin();
      compute_chained_tiles();
      epilogue();
    }
    release_q_stage();
    if (thread_of_cta() % 32 == 0) tma_store_wait();
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];
  enum class Tile { kPlain, kSpecial };

  // The producer is warpgroup 0, so this is at least 1. Named barrier 0 is __syncthreads()'s.
  static __device__ __forceinline__ int warpgroup() { return thread_of_cta() / kWarpgroup; }

  // --- Q stages: a head work tile's info and Q.

  __device__ __forceinline__ HeadWorkTile acquire_q_stage() {
    barrier_wait(map_.work_full(rows_.q_stage().stage()), rows_.q_stage().parity());
    barrier_wait(map_.q_full(rows_.q_stage().stage()), rows_.q_stage().parity());
    HeadWorkTile head_tile = map_.head_tile(rows_.q_stage().stage(), warpgroup() - 1);
    keep(head_tile.address);
    return head_tile;
  }

  // Finished rows are stored from the memory of their Q. So a Q stage is released during the next one, after the TMA
  // store has read it.
  __device__ __forceinline__ void release_q_stage() {
    if ((rows_.flags & AttentionState<C>::kWriting) == 0) [[likely]]
      return;
    if (thread_of_cta() % 32 == 0) tma_store_wait_read();
    barrier_arrive(map_.q_empty(C::kQStages == 1 ? 0U : rows_.q_stage().stage() ^ 1U));
    rows_.flags &= ~AttentionState<C>::kWriting;
  }

  // --- K/V stages. Where K is released before V, each warp arrives for K.

  // In a CTA pair one thread arrives at each CTA's barrier.
  static __device__ __forceinline__ void arrive_in_each_cta(std::uint32_t barrier) {
    if constexpr (C::kClusterCtas > 1) {
      barrier_arrive_at(map_to_cta(barrier, static_cast<std::uint32_t>(thread_of_cta() % 32)));
    } else {
      barrier_arrive(barrier);
    }
  }
  __device__ __forceinline__ void release_k(std::uint32_t stage) const {
    if (thread_of_cta() % 32 < C::kClusterCtas) arrive_in_each_cta(map_.k_empty(stage));
  }
  __device__ __forceinline__ void release_v() const {
    if (rows_.has(AttentionState<C>::kLeader)) arrive_in_each_cta(map_.v_empty(ring_.stage()));
  }
  // Skips tiles of the KV loop that the head work tile does not attend to.
  __device__ __forceinline__ void skip_tiles(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring_.advance()) {
      barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
      barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
      named_sync(warpgroup(), kWarpgroup);  // keeps the warps within one turn of the stages
      if constexpr (C::kKeysAhead) release_k(ring_.stage());
      release_v();
    }
  }

  // --- The next tile.

  // index of the tile in its sequence
  __device__ __forceinline__ int number() const { return head_tile_.number(p_, tiles_left_); }
  // Whether the tile begins a split while the previous one is still current.
  __device__ __forceinline__ bool begins_next_split() const {
    return head_tile_.begins_split(tiles_left_) && rows_.has(AttentionState<C>::kCurrent);
  }
  // How many tiles are left when the next special tile comes.
  __device__ __forceinline__ int next_stop() const {
    return rows_.has(AttentionState<C>::kSpecial) ? tiles_left_ : head_tile_.stop(tiles_left_);
  }
  // Called after the scores of a tile. A split that ends with the task's last tile is merged before the state is saved.
  __device__ __forceinline__ void note_complete_split() {
    if (tiles_left_ == 1 && p_.state.save && head_tile_.begins_split(0))
      rows_.flags |= AttentionState<C>::kSplitComplete;
  }

  // --- Scores and probabilities.

  // Scores → probabilities and the thread's shares of their sums. Returns whether a row of the warp exceeds the rescale
  // threshold.
  template <Tile kTile>
  __device__ __forceinline__ bool softmax_step(Scores& s) {
    if constexpr (kTile == Tile::kSpecial) {
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (head_tile_.masked(tiles_left_)) mask_tile<C>(p_, head_tile_, number(), s);
      if (rows_.has(AttentionState<C>::kSpecial)) {
        fix_offset<C>(p_, rows_, s);
        // The warps of a warpgroup must take the same path through its wgmma.
        const bool more = p_.softmax.scaled_first || !rows_.has_offset(0) || !rows_.has_offset(1);
        if (!named_any(warpgroup(), kWarpgroup, more)) rows_.flags &= ~AttentionState<C>::kSpecial;
      }
    }
    exponentiate<C>(p_, rows_.shift, s, sum_);
    return __any_sync(0xffffffffU, sum_[0] > kMax || sum_[1] > kMax) != 0;
  }
  // Recomputes the tile for the rows of this warp that exceed the rescale threshold.
  __device__ __forceinline__ void recompute(Scores& s) {
    Recomputed<C> recomputed;
    recompute_key_tile<C>(p_, head_tile_, number(), map_.q(head_tile_), map_.k(ring_.stage()), rows_.shift[0],
                          rows_.shift[1], sum_[0], sum_[1], recomputed);
    take_over<C>(recomputed, rows_, s, sum_);
  }
  __device__ __forceinline__ void add_sums() {
    rows_.l[0] = __fadd_rn(rows_.l[0], sum_[0]);
    rows_.l[1] = __fadd_rn(rows_.l[1], sum_[1]);
  }

  // Computes a tile's probabilities without overlap in this warpgroup.
  template <Tile kTile>
  __device__ __forceinline__ void score() {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    qk_gemm<C>(s, map_.q(head_tile_), map_.k(ring_.stage()));
    if constexpr (kTile == Tile::kSpecial) release_q_stage();
    wgmma_wait<0>();
    pin(s);
    if (softmax_step<kTile>(s)) [[unlikely]]
      recompute(s);
    if constexpr (C::kKeysAhead) release_k(ring_.stage());
    pack<C>(s, probability_);
    add_sums();
  }
  // Computes P V of the tile.
  __device__ __forceinline__ void add_outputs(bool first) {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    pv_gemm<C>(rows_.o, probability_, map_.v(ring_.stage()), first);
    wgmma_wait<0>();
    pin(rows_.o);
    release_v();
  }
  // Computes P V of the previous tile, whose probabilities are ready, and during that wgmma the probabilities of this
  // tile.
  template <Tile kTile>
  __device__ __forceinline__ void add_outputs_and_score() {
    PackedPipelineState<C::kStages> next = ring_;
    next.advance();
    Scores s;
    barrier_wait(map_.k_full(next.stage()), next.parity());
    qk_gemm<C>(s, map_.q(head_tile_), map_.k(next.stage()));
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    pv_gemm<C>(rows_.o, probability_, map_.v(ring_.stage()), begin_outputs());
    wgmma_wait<1>();
    pin(s);
    bool merged = false;
    if constexpr (kTile == Tile::kSpecial) {
      release_q_stage();
      merged = begins_next_split();
      if (merged) {
        wgmma_wait<0>();
        pin(rows_.o);
        release_v();
        merge_current_split<C>(p_, head_tile_, rows_);
      }
    }
    const bool exceeds_threshold = softmax_step<kTile>(s);
    end_block(p_);
    if (C::kKeysAhead && !exceeds_threshold) release_k(next.stage());
    wgmma_wait<0>();
    pin(rows_.o);
    if (!merged) release_v();
    ring_ = next;
    if (exceeds_threshold) [[unlikely]] {
      recompute(s);
      if constexpr (C::kKeysAhead) release_k(ring_.stage());
    }
    pack<C>(s, probability_);
    add_sums();
  }
  // Returns whether the next P V is the first of its split, which becomes the current one.
  __device__ __forceinline__ bool begin_outputs() {
    const bool first = rows_.has(AttentionState<C>::kOverwriteAcc);
    rows_.flags = (rows_.flags | AttentionState<C>::kCurrent) & ~AttentionState<C>::kOverwriteAcc;
    return first;
  }

  // --- The tiles of a head work tile.

  __device__ __forceinline__ void mainloop_serial() {
    while (tiles_left_ > 0) {
      const int stop = next_stop();
#pragma unroll 1
      for (; tiles_left_ > stop; --tiles_left_, ring_.advance()) {
        score<Tile::kPlain>();
        add_outputs(false);
      }
      if (tiles_left_ == 0) break;
      if (begins_next_split()) merge_current_split<C>(p_, head_tile_, rows_);
      score<Tile::kSpecial>();
      note_complete_split();
      add_outputs(begin_outputs());
      --tiles_left_;
      ring_.advance();
    }
  }
  // `scored`: the first tile has its probabilities already.
  __device__ __forceinline__ void mainloop_overlapped(bool scored) {
    if (!scored) {
      if (tiles_left_ == 0) return;
      if (begins_next_split()) merge_current_split<C>(p_, head_tile_, rows_);
      score<Tile::kSpecial>();
      note_complete_split();
      --tiles_left_;
    }
    while (tiles_left_ > 0) {
      const int stop = next_stop();
#pragma unroll 1
      for (; tiles_left_ > stop; --tiles_left_) add_outputs_and_score<Tile::kPlain>();
      if (tiles_left_ == 0) break;
      add_outputs_and_score<Tile::kSpecial>();
      note_complete_split();
      --tiles_left_;
    }
    add_outputs(begin_outputs());
    ring_.advance();
  }

  // --- From one head work tile to the next.

  __device__ __forceinline__ void compute_chained_tiles() {
    for (bool scored = false;; scored = true) {
      if constexpr (C::kOverlaps) {
        mainloop_overlapped(scored);
      } else {
        mainloop_serial();
      }
      skip_tiles(head_tile_.kv_loop() - head_tile_.end());
      release_q_stage();
      rows_.flags += AttentionState<C>::kNextQStage;
      if constexpr (C::kQStages == 1) return;
      // Merged splits would have to be waited for. Without a saved state, both halves have some or neither has.
      if (!params_.overlaps_epilogue || !head_tile_.whole() || rows_.has_merged(0)) return;
      const HeadWorkTile next = acquire_q_stage();
      if (next.kv_loop() <= 0 || next.begin() > 0 || next.end() == 0) return;
      start_next_tile(next);
    }
  }
  // The first Q K of the next head work tile runs during the epilogue of this one. Rows that see a key of that tile
  // take their softmax_offsets from it, so no row can exceed the rescale threshold and recompute it.
  __device__ __forceinline__ void start_next_tile(const HeadWorkTile& next) {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    qk_gemm<C>(s, map_.q(next), map_.k(ring_.stage()));
    const float softmax_offsets[2] = {offset_of(rows_, 0), offset_of(rows_, 1)};
    const float sums[2] = {sum_of_quad(rows_.l[0]), sum_of_quad(rows_.l[1])};
    float inverse[2];
    end_softmax(p_, head_tile_, softmax_offsets, sums, inverse);
    stage_rows<C>(rows_, inverse, map_.q(head_tile_));
    send_rows<C>(params_, head_tile_, map_.q(head_tile_));
    rows_.flags = AttentionState<C>::kWriting | (rows_.flags & AttentionState<C>::kKept) | AttentionState<C>::kSpecial |
                  (C::kOverlaps ? AttentionState<C>::kOverwriteAcc : AttentionState<C>::kCurrent);
    head_tile_.address = next.address;
    keep(head_tile_.address);
    tiles_left_ = head_tile_.end();
    rows_.shift[0] = 0.0F;
    rows_.shift[1] = 0.0F;
    wgmma_wait<0>();
    pin(s);
    if (head_tile_.masked(tiles_left_)) mask_tile<C>(p_, head_tile_, head_tile_.origin(), s);
    fix_offset<C>(p_, rows_, s);
    if (!named_any(warpgroup(), kWarpgroup, !rows_.has_offset(0) || !rows_.has_offset(1)))
      rows_.flags &= ~AttentionState<C>::kSpecial;
    exponentiate<C>(p_, rows_.shift, s, sum_);
    // never taken, as in end_block(): no sum is negative
    if (__any_sync(0xffffffffU, sum_[0] < 0.0F || sum_[1] < 0.0F)) __trap();
    pack<C>(s, probability_);
    rows_.l[0] = 0.0F;
    rows_.l[1] = 0.0F;
    add_sums();
    release_q_stage();
    if constexpr (C::kKeysAhead) release_k(ring_.stage());
    if constexpr (!C::kOverlaps) {
      add_outputs(true);
      ring_.advance();
    }
    --tiles_left_;
  }
  __device__ __forceinline__ void epilogue() {
    if (p_.state.save) {
      if (rows_.has(AttentionState<C>::kSplitComplete))
        // otherwise both splits would have to be saved
        merge_current_split<C>(p_, head_tile_, rows_);
      save_rows<C>(p_, head_tile_, rows_);
    }
    if (p_.finish) finish_rows<C>(params_, head_tile_, map_.q(head_tile_), rows_);
    rows_.flags = AttentionState<C>::kWriting | (rows_.flags & AttentionState<C>::kKept);
    if constexpr (C::kQStages == 1) release_q_stage();
  }

  static constexpr float kMax = kRescaleThreshold<typename C::Element>;

  const HopperParams& params_;
  const cuda::AttentionParams& p_;
  const SharedMap<C>& map_;
  PackedPipelineState<C::kStages> ring_;
  AttentionState<C> rows_;
  HeadWorkTile head_tile_;
  int tiles_left_ = 0;  // tiles left in the head work tile
  float sum_[2] = {};   // Σ p of this thread's columns of the tile
  std::uint32_t probability_[C::kKeyTile / 16][4];
};

template <class C>
__device__ __forceinline__ void consume(const HopperParams& params, const SharedMap<C>& map) {
  Consumer<C>(params, map).run();
}

}  // namespace ringattn::sm90
