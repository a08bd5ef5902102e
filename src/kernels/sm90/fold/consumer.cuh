// SPDX-License-Identifier: Apache-2.0
// A folding warpgroup. For each round it folds its unit, 64 query rows of one head, over the unit's part of the
// bundle's walk over key tiles, and lets the other tiles of the walk pass. While it works at its exponentials, the
// tensor cores work for the other warpgroups, and where registers allow it (C::kOverlaps) for its own tile before.
//
// A tile takes one of two ways. Most are plain: every row sees every key and has its reference. The others mask scores,
// set references, begin a group, or give a round's memory back; where they come is known from the unit (Unit::stop()).
#pragma once

#include "kernels/sm90/fold/products.cuh"
#include "kernels/sm90/fold/redo.cuh"
#include "kernels/sm90/fold/rows.cuh"
#include "kernels/sm90/ptx/cluster.cuh"

namespace ringattn::sm90 {

template <class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const HopperParams& params, const SharedMap<C>& map)
      : params_(params), p_(params.fold), map_(map) {
    rows_.flags = thread_of_warpgroup() < C::kWalkCtas ? Rows<C>::kLeader : 0U;
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      unit_ = take_round();
      if (unit_.walk() == kNoMoreWork) break;
      begin_rows<C>(p_, unit_, rows_);
      let_pass(unit_.begin());
      left_ = unit_.end() - unit_.begin();
      fold_unit_and_chained_ones();
      save_and_finish();
    }
    give_round_back();
    if (thread_of_cta() % 32 == 0) store_wait();
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];
  enum class Tile { kPlain, kSpecial };

  // The first warpgroup fetches, so this one's number is at least 1; named barrier 0 is __syncthreads()'s.
  static __device__ __forceinline__ int warpgroup() { return thread_of_cta() / kWarpgroup; }

  // --- Rounds: a unit's work, its Q, and the shared memory that both lie in.

  __device__ __forceinline__ Unit take_round() {
    barrier_wait(map_.work_full(rows_.round().stage()), rows_.round().parity());
    barrier_wait(map_.q_full(rows_.round().stage()), rows_.round().parity());
    Unit unit = map_.unit(rows_.round().stage(), warpgroup() - 1);
    keep(unit.address);
    return unit;
  }

  // A round's finished rows leave from where its Q was. So its memory is given back in the next round, when the copy
  // engine has read them.
  __device__ __forceinline__ void give_round_back() {
    if ((rows_.flags & Rows<C>::kWriting) == 0) [[likely]]
      return;
    if (thread_of_cta() % 32 == 0) store_wait_read();
    barrier_arrive(map_.q_empty(C::kRounds == 1 ? 0U : rows_.round().stage() ^ 1U));
    rows_.flags &= ~Rows<C>::kWriting;
  }

  // --- Stages of K and V. Where K goes back ahead of V, each warp says when it is done with K.

  // Where CTAs walk side by side, one thread for each of them arrives there.
  static __device__ __forceinline__ void arrive_in_each_cta(std::uint32_t barrier) {
    if constexpr (C::kWalkCtas > 1) {
      barrier_arrive_at(in_cta(barrier, static_cast<std::uint32_t>(thread_of_cta() % 32)));
    } else {
      barrier_arrive(barrier);
    }
  }
  __device__ __forceinline__ void give_k_back(std::uint32_t stage) const {
    if (thread_of_cta() % 32 < C::kWalkCtas) arrive_in_each_cta(map_.k_empty(stage));
  }
  __device__ __forceinline__ void give_v_back() const {
    if (rows_.has(Rows<C>::kLeader)) arrive_in_each_cta(map_.v_empty(ring_.stage()));
  }
  // Tiles of the walk that none of the unit's rows folds.
  __device__ __forceinline__ void let_pass(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring_.advance()) {
      barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
      barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
      named_sync(warpgroup(), kWarpgroup);  // no warp may fall behind by a turn of the stages
      if constexpr (C::kKeysAhead) give_k_back(ring_.stage());
      give_v_back();
    }
  }

  // --- The tile that comes next.

  __device__ __forceinline__ int number() const { return unit_.number(p_, left_); }  // in its sequence
  // Whether it begins a group while the one before is open.
  __device__ __forceinline__ bool begins_next_group() const {
    return unit_.begins_group(left_) && rows_.has(Rows<C>::kOpen);
  }
  // How many tiles will be left when the next one comes that needs more than the plain way.
  __device__ __forceinline__ int next_stop() const { return rows_.has(Rows<C>::kSpecial) ? left_ : unit_.stop(left_); }
  // Called once a tile is scored. A group that ends with the task's last tile is closed before the state is saved.
  __device__ __forceinline__ void note_full_group() {
    if (left_ == 1 && p_.state.save && unit_.begins_group(0)) rows_.flags |= Rows<C>::kFull;
  }

  // --- Scores and probabilities.

  // Scores → probabilities and the thread's shares of their sums. Returns whether a row of the warp has outgrown its
  // reference.
  template <Tile kTile>
  __device__ __forceinline__ bool weigh(Scores& s) {
    if constexpr (kTile == Tile::kSpecial) {
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (unit_.masked(left_)) mask_tile<C>(p_, unit_, number(), s);
      if (rows_.has(Rows<C>::kSpecial)) {
        settle<C>(p_, rows_, s);
        // The warps of a warpgroup take the same way through the products, as wgmma demands.
        const bool more = p_.softmax.scaled_first || !rows_.seen(0) || !rows_.seen(1);
        if (!named_any(warpgroup(), kWarpgroup, more)) rows_.flags &= ~Rows<C>::kSpecial;
      }
    }
    exponentiate<C>(p_, rows_.shift, s, sum_);
    return __any_sync(0xffffffffU, sum_[0] > kMost || sum_[1] > kMost) != 0;
  }
  // Does the tile again for the rows of this warp that have outgrown their reference.
  __device__ __forceinline__ void weigh_again(Scores& s) {
    Redone<C> redone;
    redo<C>(p_, unit_, number(), map_.q(unit_), map_.k(ring_.stage()), rows_.shift[0], rows_.shift[1], sum_[0], sum_[1],
            redone);
    take_over<C>(redone, rows_, s, sum_);
  }
  __device__ __forceinline__ void add_sums() {
    rows_.l[0] = __fadd_rn(rows_.l[0], sum_[0]);
    rows_.l[1] = __fadd_rn(rows_.l[1], sum_[1]);
  }

  // A tile's scores and probabilities, with nothing of this warpgroup beside them.
  template <Tile kTile>
  __device__ __forceinline__ void score() {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    multiply_q_k<C>(s, map_.q(unit_), map_.k(ring_.stage()));
    if constexpr (kTile == Tile::kSpecial) give_round_back();
    wgmma_wait<0>();
    pin(s);
    if (weigh<kTile>(s)) [[unlikely]]
      weigh_again(s);
    if constexpr (C::kKeysAhead) give_k_back(ring_.stage());
    pack<C>(s, probability_);
    add_sums();
  }
  // Its part of the outputs.
  __device__ __forceinline__ void add_outputs(bool first) {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    add_p_v<C>(rows_.o, probability_, map_.v(ring_.stage()), first);
    wgmma_wait<0>();
    pin(rows_.o);
    give_v_back();
  }
  // The outputs of the tile before, whose probabilities are there, and beside that product this tile's probabilities.
  template <Tile kTile>
  __device__ __forceinline__ void add_outputs_and_score() {
    RingCursor<C::kStages> next = ring_;
    next.advance();
    Scores s;
    barrier_wait(map_.k_full(next.stage()), next.parity());
    multiply_q_k<C>(s, map_.q(unit_), map_.k(next.stage()));
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    add_p_v<C>(rows_.o, probability_, map_.v(ring_.stage()), begin_outputs());
    wgmma_wait<1>();
    pin(s);
    bool closed = false;
    if constexpr (kTile == Tile::kSpecial) {
      give_round_back();
      closed = begins_next_group();
      if (closed) {
        wgmma_wait<0>();
        pin(rows_.o);
        give_v_back();
        close_group<C>(p_, unit_, rows_);
      }
    }
    const bool outgrown = weigh<kTile>(s);
    end_block(p_);
    if (C::kKeysAhead && !outgrown) give_k_back(next.stage());
    wgmma_wait<0>();
    pin(rows_.o);
    if (!closed) give_v_back();
    ring_ = next;
    if (outgrown) [[unlikely]] {
      weigh_again(s);
      if constexpr (C::kKeysAhead) give_k_back(ring_.stage());
    }
    pack<C>(s, probability_);
    add_sums();
  }
  // Whether the product that comes is the first of its group; from now on the group is open.
  __device__ __forceinline__ bool begin_outputs() {
    const bool first = rows_.has(Rows<C>::kFresh);
    rows_.flags = (rows_.flags | Rows<C>::kOpen) & ~Rows<C>::kFresh;
    return first;
  }

  // --- The tiles of a unit.

  __device__ __forceinline__ void fold_in_turn() {
    while (left_ > 0) {
      const int stop = next_stop();
#pragma unroll 1
      for (; left_ > stop; --left_, ring_.advance()) {
        score<Tile::kPlain>();
        add_outputs(false);
      }
      if (left_ == 0) break;
      if (begins_next_group()) close_group<C>(p_, unit_, rows_);
      score<Tile::kSpecial>();
      note_full_group();
      add_outputs(begin_outputs());
      --left_;
      ring_.advance();
    }
  }
  // `scored`: the first tile has its probabilities already.
  __device__ __forceinline__ void fold_overlapped(bool scored) {
    if (!scored) {
      if (left_ == 0) return;
      if (begins_next_group()) close_group<C>(p_, unit_, rows_);
      score<Tile::kSpecial>();
      note_full_group();
      --left_;
    }
    while (left_ > 0) {
      const int stop = next_stop();
#pragma unroll 1
      for (; left_ > stop; --left_) add_outputs_and_score<Tile::kPlain>();
      if (left_ == 0) break;
      add_outputs_and_score<Tile::kSpecial>();
      note_full_group();
      --left_;
    }
    add_outputs(begin_outputs());
    ring_.advance();
  }

  // --- From unit to unit.

  __device__ __forceinline__ void fold_unit_and_chained_ones() {
    for (bool scored = false;; scored = true) {
      if constexpr (C::kOverlaps) {
        fold_overlapped(scored);
      } else {
        fold_in_turn();
      }
      let_pass(unit_.walk() - unit_.end());
      give_round_back();
      rows_.flags += Rows<C>::kNextRound;
      if constexpr (C::kRounds == 1) return;
      // Closed groups would have to be waited for. In a task without a state both halves have them or none.
      if (!params_.chains || !unit_.whole() || rows_.summed(0)) return;
      const Unit next = take_round();
      if (next.walk() <= 0 || next.begin() > 0 || next.end() == 0) return;
      chain(next);
    }
  }
  // The next unit's first product runs beside the end of this unit. Rows that see something of that tile take their
  // references from it, so none can have outgrown them: the tile need not be done again.
  __device__ __forceinline__ void chain(const Unit& next) {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    multiply_q_k<C>(s, map_.q(next), map_.k(ring_.stage()));
    const float references[2] = {reference_of(rows_, 0), reference_of(rows_, 1)};
    const float sums[2] = {sum_of_quad(rows_.l[0]), sum_of_quad(rows_.l[1])};
    float inverse[2];
    end_softmax(p_, unit_, references, sums, inverse);
    stage_rows<C>(rows_, inverse, map_.q(unit_));
    send_rows<C>(params_, unit_, map_.q(unit_));
    rows_.flags = Rows<C>::kWriting | (rows_.flags & Rows<C>::kKept) | Rows<C>::kSpecial |
                  (C::kOverlaps ? Rows<C>::kFresh : Rows<C>::kOpen);
    unit_.address = next.address;
    keep(unit_.address);
    left_ = unit_.end();
    rows_.shift[0] = 0.0F;
    rows_.shift[1] = 0.0F;
    wgmma_wait<0>();
    pin(s);
    if (unit_.masked(left_)) mask_tile<C>(p_, unit_, unit_.origin(), s);
    settle<C>(p_, rows_, s);
    if (!named_any(warpgroup(), kWarpgroup, !rows_.seen(0) || !rows_.seen(1))) rows_.flags &= ~Rows<C>::kSpecial;
    exponentiate<C>(p_, rows_.shift, s, sum_);
    if (__any_sync(0xffffffffU, sum_[0] < 0.0F || sum_[1] < 0.0F)) __trap();  // as end_block(): no sum is negative
    pack<C>(s, probability_);
    rows_.l[0] = 0.0F;
    rows_.l[1] = 0.0F;
    add_sums();
    give_round_back();
    if constexpr (C::kKeysAhead) give_k_back(ring_.stage());
    if constexpr (!C::kOverlaps) {
      add_outputs(true);
      ring_.advance();
    }
    --left_;
  }
  __device__ __forceinline__ void save_and_finish() {
    if (p_.state.save) {
      if (rows_.has(Rows<C>::kFull)) close_group<C>(p_, unit_, rows_);  // else both would have to be saved
      save_rows<C>(p_, unit_, rows_);
    }
    if (p_.finish) finish_rows<C>(params_, unit_, map_.q(unit_), rows_);
    rows_.flags = Rows<C>::kWriting | (rows_.flags & Rows<C>::kKept);
    if constexpr (C::kRounds == 1) give_round_back();
  }

  static constexpr float kMost = kOutgrown<typename C::Element>;

  const HopperParams& params_;
  const cuda::FoldParams& p_;
  const SharedMap<C>& map_;
  RingCursor<C::kStages> ring_;
  Rows<C> rows_;
  Unit unit_;
  int left_ = 0;       // tiles of the unit
  float sum_[2] = {};  // Σ p of this thread's columns of the tile
  std::uint32_t probability_[C::kKeyTile / 16][4];
};

template <class C>
__device__ __forceinline__ void consume(const HopperParams& params, const SharedMap<C>& map) {
  Consumer<C>(params, map).run();
}

}  // namespace ringattn::sm90
