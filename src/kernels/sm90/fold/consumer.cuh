// SPDX-License-Identifier: Apache-2.0
// What a folding warpgroup does: for each round, its unit's 64 rows over the bundle's walk of key tiles. It lets the
// tiles pass that its own rows don't fold. While it is at its exponentials, the tensor cores work for the others, and,
// where registers allow it (C::kOverlaps), for its own tile before.
#pragma once

#include "kernels/sm90/fold/redo.cuh"
#include "kernels/sm90/fold/rows.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace ringattn::sm90 {

// A number that all lanes have, told so that the compiler knows it: what follows from it, descriptors above all, is
// then worked out once a warp, in uniform registers.
__device__ __forceinline__ std::uint32_t of_warp(std::uint32_t number) { return __shfl_sync(0xffffffffU, number, 0); }

template <class C>
__device__ __forceinline__ void multiply_q_k(float (&s)[C::kKeyTile / 8][4], std::uint32_t q_tile,
                                             std::uint32_t k_tile) {
  const std::uint32_t q = of_warp(descriptor_low(q_tile));
  const std::uint32_t k = of_warp(descriptor_low(k_tile));
  pin(s);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kDim / 16; ++step) {
    const auto at = [step](int panel_bytes) {
      return static_cast<std::uint32_t>((step / 4 * panel_bytes + step % 4 * 32) >> 4);
    };
    Wgmma<typename C::Element, C::kKeyTile>::ss(s, descriptor(q + at(SharedMap<C>::kQPanel)),
                                                descriptor(k + at(SharedMap<C>::kTilePanel)), step > 0);
  }
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void add_p_v(float (&o)[C::kDimV / 8][4],
                                        const std::uint32_t (&probability)[C::kKeyTile / 16][4], std::uint32_t v_tile,
                                        bool first) {
  const std::uint32_t v = of_warp(descriptor_low(v_tile, SharedMap<C>::kTilePanel));
  pin(o);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kKeyTile / 16; ++step) {
    Wgmma<typename C::Element, C::kDimV>::rs(
        o, probability[step], descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)),
        step > 0 || !first);
  }
  wgmma_commit();
}

// A branch that is never taken. It ends the basic block: else ptxas (13.0) moves the softmax behind the wait that it
// should come before, or runs out of registers between it and P V.
__device__ __forceinline__ void end_block(const cuda::FoldParams& p) {
  if (p.heads == 0) __trap();
}

template <class C>
__device__ __forceinline__ void consume(const HopperParams& params, const SharedMap<C>& map) {
  const cuda::FoldParams& p = params.fold;
  // The first warpgroup fetches; barrier 0 is __syncthreads()'s.
  const auto warpgroup = [] { return thread_of_cta() / kWarpgroup; };

  RingCursor<C::kStages> ring;
  // A round's shared memory is given back when the copy engine has read its finished rows: in the next round.
  Rows<C> rows;
  rows.flags = thread_of_warpgroup() < C::kWalkCtas ? Rows<C>::kLeader : 0U;
  const auto give_back = [&] {
    if ((rows.flags & Rows<C>::kWriting) == 0) [[likely]]
      return;
    if (thread_of_cta() % 32 == 0) store_wait_read();
    barrier_arrive(map.q_empty(C::kRounds == 1 ? 0U : rows.round().stage() ^ 1U));
    rows.flags &= ~Rows<C>::kWriting;
  };
  // In each CTA that walks along, by another thread.
  const auto arrive_in_each = [](std::uint32_t barrier) {
    if constexpr (C::kWalkCtas > 1) {
      barrier_arrive_at(in_cta(barrier, static_cast<std::uint32_t>(thread_of_cta() % 32)));
    } else {
      barrier_arrive(barrier);
    }
  };
  // A stage goes back; where K goes ahead, each warp says when it is done with it.
  const auto give_k = [&](std::uint32_t stage) {
    if (thread_of_cta() % 32 < C::kWalkCtas) arrive_in_each(map.k_empty(stage));
  };
  const auto give_v = [&] {
    if (rows.has(Rows<C>::kLeader)) arrive_in_each(map.v_empty(ring.stage()));
  };
  const auto let_pass = [&](int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring.advance()) {
      barrier_wait(map.k_full(ring.stage()), ring.parity());
      barrier_wait(map.v_full(ring.stage()), ring.parity());
      named_sync(warpgroup(), kWarpgroup);  // no warp may fall behind by a turn of the stages
      if constexpr (C::kKeysAhead) give_k(ring.stage());
      give_v();
    }
  };

  const auto take_round = [&] {
    barrier_wait(map.work_full(rows.round().stage()), rows.round().parity());
    barrier_wait(map.q_full(rows.round().stage()), rows.round().parity());
    Unit unit = map.unit(rows.round().stage(), warpgroup() - 1);
    keep(unit.address);
    return unit;
  };

  for (;;) {
    Unit unit = take_round();
    if (unit.walk() < 0) break;
    begin_rows<C>(p, unit, rows);

    let_pass(unit.begin());
    int left = unit.end() - unit.begin();  // of its tiles
    using Scores = float[C::kKeyTile / 8][4];
    float sum[2] = {};
    std::uint32_t probability[C::kKeyTile / 16][4];
    constexpr float kMost = kOutgrown<typename C::Element>;
    const auto number = [&] { return unit.number(p, left); };
    // Whether the tile that comes begins a group while the one before is open.
    const auto group_is_full = [&] { return number() % kGroupTiles == 0 && rows.has(Rows<C>::kOpen); };
    // Scores → probabilities. Whether a row has outgrown its reference.
    const auto weigh = [&]<bool kPlain>(Scores& s) {
      if constexpr (!kPlain) {
        if (p.softmax.scaled_first) scale_scores(p, s);
        if (unit.masked(left)) mask_tile<C>(p, unit, number(), s);
        if (rows.has(Rows<C>::kSpecial)) {
          settle<C>(p, rows, s);
          // The warps of a warpgroup take the same way through the products, as wgmma demands.
          const bool more = p.softmax.scaled_first || !rows.seen(0) || !rows.seen(1);
          if (!named_any(warpgroup(), kWarpgroup, more)) rows.flags &= ~Rows<C>::kSpecial;
        }
      }
      exponentiate<C>(p, rows.shift, s, sum);
      return __any_sync(0xffffffffU, sum[0] > kMost || sum[1] > kMost) != 0;
    };
    const auto weigh_again = [&](Scores& s) {
      Redone<C> redone;
      redo<C>(params, unit, number(), map.q(unit), map.k(ring.stage()), rows.shift[0], rows.shift[1], sum[0], sum[1],
              redone);
      take_over<C>(redone, rows, s, sum);
    };
    const auto add_sums = [&] {
      rows.l[0] = __fadd_rn(rows.l[0], sum[0]);
      rows.l[1] = __fadd_rn(rows.l[1], sum[1]);
    };
    // A tile in turn: its scores and probabilities, then its part of the outputs.
    const auto score = [&]<bool kPlain>() {
      Scores s;
      barrier_wait(map.k_full(ring.stage()), ring.parity());
      multiply_q_k<C>(s, map.q(unit), map.k(ring.stage()));
      if constexpr (!kPlain) give_back();
      wgmma_wait<0>();
      pin(s);
      if (weigh.template operator()<kPlain>(s)) [[unlikely]]
        weigh_again(s);
      if constexpr (C::kKeysAhead) give_k(ring.stage());
      pack<C>(s, probability);
      add_sums();
    };
    const auto add = [&](bool first) {
      barrier_wait(map.v_full(ring.stage()), ring.parity());
      add_p_v<C>(rows.o, probability, map.v(ring.stage()), first);
      wgmma_wait<0>();
      pin(rows.o);
      give_v();
    };
    // The part of the outputs of the tile before, whose probabilities are there; beside it this tile's.
    const auto add_and_score = [&]<bool kPlain>() {
      RingCursor<C::kStages> next = ring;
      next.advance();
      Scores s;
      barrier_wait(map.k_full(next.stage()), next.parity());
      multiply_q_k<C>(s, map.q(unit), map.k(next.stage()));
      barrier_wait(map.v_full(ring.stage()), ring.parity());
      add_p_v<C>(rows.o, probability, map.v(ring.stage()), rows.has(Rows<C>::kFresh));
      rows.flags = (rows.flags | Rows<C>::kOpen) & ~Rows<C>::kFresh;
      wgmma_wait<1>();
      pin(s);
      if constexpr (!kPlain) give_back();
      const bool outgrown = weigh.template operator()<kPlain>(s);
      end_block(p);
      if (C::kKeysAhead && !outgrown) give_k(next.stage());
      wgmma_wait<0>();
      pin(rows.o);
      give_v();
      ring = next;
      if (outgrown) [[unlikely]] {
        weigh_again(s);
        if constexpr (C::kKeysAhead) give_k(ring.stage());
      }
      pack<C>(s, probability);
      add_sums();
    };
    const auto note_full = [&] {
      if (left == 1 && p.state.save && (number() + 1) % kGroupTiles == 0) rows.flags |= Rows<C>::kFull;
    };
    const auto fold_in_turn = [&] {
      while (left > 0) {
        // Down to where `left` is this, tiles need no more than the plain steps.
        const int stop = rows.has(Rows<C>::kSpecial) ? left : unit.stop(left);
#pragma unroll 1
        for (; left > stop; --left, ring.advance()) {
          score.template operator()<true>();
          add(false);
        }
        if (left == 0) break;
        if (group_is_full()) close_group<C>(p, unit, rows);
        score.template operator()<false>();
        note_full();
        const bool first = rows.has(Rows<C>::kFresh);
        rows.flags = (rows.flags | Rows<C>::kOpen) & ~Rows<C>::kFresh;
        add(first);
        --left;
        ring.advance();
      }
    };
    // `pending`: a tile has its probabilities already. A group begins with a tile by itself: the one before is closed
    // once its last products are there.
    const auto fold_overlapped = [&](bool pending) {
      for (; pending || left > 0; pending = false) {
        if (!pending) {
          if (group_is_full()) close_group<C>(p, unit, rows);
          score.template operator()<false>();
          note_full();
          --left;
        }
        while (left > 0) {
          const int stop = rows.has(Rows<C>::kSpecial) ? left : unit.stop(left);
#pragma unroll 1
          for (; left > stop; --left) add_and_score.template operator()<true>();
          if (left == 0 || number() % kGroupTiles == 0) break;
          add_and_score.template operator()<false>();
          note_full();
          --left;
        }
        add(rows.has(Rows<C>::kFresh));
        rows.flags = (rows.flags | Rows<C>::kOpen) & ~Rows<C>::kFresh;
        ring.advance();
      }
    };
    // From unit to unit without a pause: the next one's first product runs beside the end of this one. Rows that see
    // something of its first tile take their references from it, so doing it again (by mma.sync, which gives the same
    // scores) would change nothing.
    const auto chain = [&](const Unit& next) {
      Scores s;
      barrier_wait(map.k_full(ring.stage()), ring.parity());
      multiply_q_k<C>(s, map.q(next), map.k(ring.stage()));
      const float references[2] = {reference_of(rows, 0), reference_of(rows, 1)};
      const float sums[2] = {sum_of_quad(rows.l[0]), sum_of_quad(rows.l[1])};
      float inverse[2];
      end_softmax(p, unit, references, sums, inverse);
      stage_rows<C>(rows, inverse, map.q(unit));
      send_rows<C>(params, unit, map.q(unit));
      rows.flags = Rows<C>::kWriting | (rows.flags & Rows<C>::kKept) | Rows<C>::kSpecial |
                   (C::kOverlaps ? Rows<C>::kFresh : Rows<C>::kOpen);
      unit.address = next.address;
      keep(unit.address);
      left = unit.end();
      rows.shift[0] = 0.0F;
      rows.shift[1] = 0.0F;
      wgmma_wait<0>();
      pin(s);
      if (unit.masked(left)) mask_tile<C>(p, unit, unit.origin(), s);
      settle<C>(p, rows, s);
      if (!named_any(warpgroup(), kWarpgroup, !rows.seen(0) || !rows.seen(1))) rows.flags &= ~Rows<C>::kSpecial;
      exponentiate<C>(p, rows.shift, s, sum);
      if (__any_sync(0xffffffffU, sum[0] < 0.0F || sum[1] < 0.0F)) __trap();  // as end_block(): no sum is negative
      pack<C>(s, probability);
      rows.l[0] = 0.0F;
      rows.l[1] = 0.0F;
      add_sums();
      give_back();
      if constexpr (C::kKeysAhead) give_k(ring.stage());
      if constexpr (!C::kOverlaps) {
        add(true);
        ring.advance();
      }
      --left;
    };
    for (bool pending = false;; pending = true) {
      if constexpr (C::kOverlaps) {
        fold_overlapped(pending);
      } else {
        fold_in_turn();
      }
      let_pass(unit.walk() - unit.end());
      give_back();
      rows.flags += Rows<C>::kNextRound;
      if constexpr (C::kRounds == 1) break;
      // Sums of groups would have to be waited for. Without a state both halves have them or none.
      if (!params.chains || !unit.whole() || rows.summed(0)) break;
      const Unit next = take_round();
      if (next.walk() <= 0 || next.begin() > 0 || next.end() == 0) break;
      chain(next);
    }

    if (p.state.save) {
      // The next task would begin with it: here it halves the state.
      if (rows.has(Rows<C>::kFull)) close_group<C>(p, unit, rows);
      save_rows<C>(p, unit, rows);
    }
    if (p.finish) finish_rows<C>(params, unit, map.q(unit), rows);
    rows.flags = Rows<C>::kWriting | (rows.flags & Rows<C>::kKept);
    if constexpr (C::kRounds == 1) give_back();
  }
  give_back();
  if (thread_of_cta() % 32 == 0) store_wait();
}

}  // namespace ringattn::sm90
