// SPDX-License-Identifier: Apache-2.0
// What a folding warpgroup does: for each round, its unit's 64 rows over the bundle's walk of key tiles.
//
// The warpgroups take turns at the exponentials, in their order: while one is at them, the tensor cores work for the
// others. A warpgroup lets the tiles pass that its own rows don't fold.
#pragma once

#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/redo.cuh"
#include "kernels/sm90/rows.cuh"

namespace ringattn::sm90 {

// Named barriers: a warpgroup's turn, and its threads among themselves.
template <class C>
struct Turns {
  int consumer;

  __device__ void wait() const { named_sync(1 + consumer, 2 * kWarpgroup); }
  __device__ void pass_on() const { named_arrive(1 + (consumer + 1) % C::kUnits, 2 * kWarpgroup); }
  __device__ void meet() const { named_sync(1 + C::kUnits + consumer, kWarpgroup); }
};

template <class C>
__device__ __forceinline__ void multiply_q_k(float (&s)[C::kKeyTile / 8][4], std::uint32_t q_tile,
                                             std::uint32_t k_tile) {
  const std::uint32_t q = descriptor_low(q_tile);
  const std::uint32_t k = descriptor_low(k_tile);
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
                                        const std::uint32_t (&probability)[C::kKeyTile / 16][4], std::uint32_t v_tile) {
  const std::uint32_t v = descriptor_low(v_tile, SharedMap<C>::kTilePanel);
  pin(o);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kKeyTile / 16; ++step) {
    Wgmma<typename C::Element, C::kDimV>::rs(
        o, probability[step], descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)));
  }
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void consume(const HopperParams& params, const SharedMap<C>& map, int consumer) {
  const cuda::FoldParams& p = params.fold;
  const Turns<C> turns{consumer};
  if (consumer == C::kUnits - 1) turns.pass_on();

  RingCursor<C::kStages> ring;
  RingCursor<kRounds> round;
  // A round's shared memory is given back when the copy engine has read its finished rows: in the next round.
  Rows<C> rows;
  rows.flags = 0;
  const auto give_back = [&] {
    if ((rows.flags & Rows<C>::kWriting) == 0) return;
    if (thread_of_warpgroup() == 0) {
      store_wait_read();
      barrier_arrive(map.q_empty(round.stage() ^ 1U));
    }
    rows.flags &= ~Rows<C>::kWriting;
  };
  const auto let_pass = [&](int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring.advance()) {
      turns.wait();
      turns.pass_on();
      barrier_wait(map.k_full(ring.stage()), ring.parity());
      barrier_wait(map.v_full(ring.stage()), ring.parity());
      turns.meet();  // no warp may fall behind by a turn of the stages
      if (thread_of_warpgroup() == 0) barrier_arrive(map.empty(ring.stage()));
    }
  };

  for (;; round.advance()) {
    barrier_wait(map.q_full(round.stage()), round.parity());
    if (load_number(map.tiles(round.stage())) < 0) break;
    const Unit unit = map.unit(round.stage(), consumer);
    const auto q_tile = [&] { return map.q(round.stage(), consumer); };
    begin_rows<C>(p, unit, rows);

    let_pass(unit.begin());
#pragma unroll 1
    for (int left = unit.end() - unit.begin(); left > 0; --left, ring.advance()) {
      float s[C::kKeyTile / 8][4];
      std::uint32_t probability[C::kKeyTile / 16][4];
      float sum[2];
      barrier_wait(map.k_full(ring.stage()), ring.parity());
      multiply_q_k<C>(s, q_tile(), map.k(ring.stage()));
      // Which tile it is; read whenever it is needed, for the sake of registers.
      const auto number = [&] { return load_number(map.number(ring.stage())); };
      give_back();
      wgmma_wait();
      pin(s);
      if (p.scaled_first) scale_scores(p, s);
      if (!unit.plain(number())) {
#pragma unroll
        for (int half = 0; half < 2; ++half) mask_scores(s, half, visible_columns<C>(p, unit, half, number()));
      }
      if (!rows.settled()) settle<C>(p, rows, s);
      turns.wait();
      exponentiate<C>(p, rows.shift, s, sum);
      turns.pass_on();
      if (__any_sync(0xffffffffU, sum[0] > kOutgrown || sum[1] > kOutgrown)) {
        Redone<C> redone;
        redo<C>(params, unit, number(), q_tile(), map.k(ring.stage()), rows.shift[0], rows.shift[1], sum[0], sum[1],
                rows.flags, redone);
        take_over<C>(redone, rows, s, sum);
      }
      rows.l[0] = __fadd_rn(rows.l[0], sum[0]);
      rows.l[1] = __fadd_rn(rows.l[1], sum[1]);
      pack<C>(s, probability);
      barrier_wait(map.v_full(ring.stage()), ring.parity());
      add_p_v<C>(rows.o, probability, map.v(ring.stage()));
      const bool last_of_group = (number() + 1) % kSumTiles == 0;
      wgmma_wait();
      pin(rows.o);
      if (thread_of_warpgroup() == 0) barrier_arrive(map.empty(ring.stage()));
      rows.flags |= Rows<C>::kOpen;
      if (last_of_group) close_group<C>(p, rows);
    }
    let_pass(load_number(map.tiles(round.stage())) - unit.end());
    give_back();

    if (p.save) save_rows<C>(p, unit, rows);
    turns.meet();  // everyone has read Q
    if (p.finish && unit.slot_begin() < unit.slot_end()) {
      finish_rows<C>(p, unit, q_tile(), rows);
      if (params.bulk_out && unit.slot_begin() == 0 && unit.slot_end() == kQueryTile) {
        proxy_fence();
        turns.meet();
        if (thread_of_warpgroup() == 0) {
#pragma unroll
          for (int panel = 0; panel < C::kPanelsV; ++panel) {
            store_box(&params.out, q_tile() + static_cast<std::uint32_t>(panel * SharedMap<C>::kQPanel),
                      panel * kPanelColumns, unit.head(), static_cast<int>(unit.row()));
          }
          store_commit();
        }
      } else {
        turns.meet();
        write_rows<C>(p, unit, q_tile());
        turns.meet();
      }
    }
    rows.flags = Rows<C>::kWriting;
  }
  give_back();
  if (thread_of_warpgroup() == 0) store_wait();
}

}  // namespace ringattn::sm90
