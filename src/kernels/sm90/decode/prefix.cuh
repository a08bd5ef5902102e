// SPDX-License-Identifier: Apache-2.0
// Folds the groups of prefixes that sequences share, once for all of them: the rows of many sequences are those of one
// product. Each unit leaves its rows' records, and the launch behind this one leaves those of the keys that sequences
// have by themselves; a merge ends the rows.
//
// Units are few, so what counts is how long a CTA takes for one. Two warpgroups score tiles in turn and write the
// probabilities to shared memory (one does, where outputs leave no registers for more); another one adds P V of all
// tiles, in order. So the tensor cores have a product to do while probabilities are made. The arithmetic is the fold's:
// its functions on the same fragments, in the same order.
//
// For that, a tile must be scored before the tiles ahead of it are. It can be, as references hardly ever move: they are
// taken from a unit's first tile. Where one moves, or is not set by then, the CTA folds its units again, tile by tile
// (prefix_whole.cuh), which writes the same records where nothing was wrong.
#pragma once

#include "kernels/sm90/decode/fetch.cuh"
#include "kernels/sm90/decode/overlap.cuh"
#include "kernels/sm90/decode/prefix_whole.cuh"
#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/ptx/matrix.cuh"

namespace ringattn::sm90 {

// A warpgroup with outputs, those that score, and one of which two warps fetch and the others end at once.
template <class C>
inline constexpr int kPrefixThreads = (2 + C::kScorers) * kWarpgroup;
template <class C>
inline constexpr int kPrefixWarps = (1 + C::kScorers) * kWarpgroup / 32 + 2;

// Registers of their threads. When those that score are done, they have given theirs back.
template <class C>
struct PrefixRegisters {
  static constexpr int kOutputs = C::kScorers == 1 ? 208 : 176;
  static constexpr int kScores = C::kScorers == 1 ? 208 : 144;
  static constexpr int kFetch = 40;
  static constexpr int kWhole = 240;
  static constexpr int kAll = 65536 / kPrefixThreads<C> / 8 * 8 * (2 + C::kScorers);
  static_assert(kOutputs + C::kScorers * kScores + kFetch <= kAll);
  static_assert(kWhole + (1 + C::kScorers) * kFetch <= kAll);
  // Sums of two tiles have places: those of one are read before those of the next but one are written.
  static_assert(C::kScorers == 1 || C::kStages % 2 == 0 || kPrefixPanels <= 3);
};

// Named barriers: query rows are there; those that score have read them; references are there.
inline constexpr int kPrefixQueries = 2;
inline constexpr int kPrefixQueriesRead = 3;
inline constexpr int kPrefixReferences = 4;

// Steps of 16 keys in each of a tile's two panels of probabilities.
template <class C>
constexpr int panel_steps(int panel) {
  constexpr int kSteps = C::kKeyTile / 16;
  static_assert(kSteps > 4 && kSteps <= 8 && PrefixMap<C>::kTilePanels == 2);
  return panel == 0 ? 4 : kSteps - 4;
}

// One of the warpgroups that score: tiles which, which + kScorers, …
template <class C>
class PrefixScorer {
 public:
  __device__ __forceinline__ PrefixScorer(const DecodeParams& params, const PrefixMap<C>& map, int which)
      : p_(params.fold), map_(map), which_(which), number_(static_cast<std::uint32_t>(which)) {
    if (which_ != 0) ring_.advance();
  }

  __device__ __forceinline__ void take(const PrefixUnit&) {
    load_queries();
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.shift[half] = 0.0F;
    static_assert(kGroupTiles % C::kScorers == 0);
#pragma unroll 1
    for (int tile = which_; tile < kGroupTiles; tile += C::kScorers) {
      Scores s;
      barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
      multiply(s, map_.k(ring_.stage()));
      wgmma_wait<0>();
      pin(s);
      if (thread_of_cta() % 32 == 0) barrier_arrive(map_.k_empty(ring_.stage()));
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (tile == which_) take_references(s);
      float sum[2];
      exponentiate<C>(p_, rows_.shift, s, sum);
      if (sum[0] > kMost || sum[1] > kMost) mark_failed();
      send(s, sum);
#pragma unroll
      for (int i = 0; i < C::kScorers; ++i) ring_.advance();
      number_ += C::kScorers;
    }
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];
  static constexpr int kSteps = C::kDim / 16;
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
  __device__ __forceinline__ void mark_failed() const { store_number(map_.failed(), 1); }

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
      if (panel == 0) store_pair(map_.sums(number_, thread_of_warpgroup()), sum[0], sum[1]);
    }
    // Once for both: the fence waits until what has been written is there.
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 != 0) return;
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel)
      barrier_arrive(map_.panel_full(turn_of(panel).place));
  }

  const cuda::FoldParams& p_;
  const PrefixMap<C>& map_;
  const int which_;
  RingCursor<C::kStages> ring_;  // of the next tile of its own
  std::uint32_t number_;         // of the same, of all units'
  Rows<C> rows_;                 // its references
  std::uint32_t q_[kSteps][4];
};

// The warpgroup that holds outputs and l.
template <class C>
class PrefixOutputs {
 public:
  __device__ __forceinline__ PrefixOutputs(const DecodeParams& params, const PrefixMap<C>& map)
      : params_(params), map_(map) {}

  __device__ __forceinline__ void take(const PrefixUnit& unit) {
    load_queries<C>(params_, map_, unit.rows, [&](int slot) { return place_of(params_, map_, unit, slot); });
    named_arrive(kPrefixQueries, (1 + C::kScorers) * kWarpgroup);
    const DecodeSlots slots = prefix_slots(params_, map_, unit);  // now, as there is nothing to do yet
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.l[half] = 0.0F;
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {  // of which nothing comes, as the first product writes over it
#pragma unroll
      for (int i = 0; i < 4; ++i) rows_.o[n][i] = 0.0F;
    }
#pragma unroll 1
    for (int tile = 0; tile < kGroupTiles; ++tile) {
      barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
      add_panel<0>(tile == 0);
      add_sums();
      add_panel<1>(false);
      ring_.advance();
      ++number_;
    }
    wgmma_wait<0>();
    pin(rows_.o);
    release_panel();
    release_values();
    const float2 shift = load_pair(map_.shift(thread_of_warpgroup()));
    rows_.shift[0] = shift.x;
    rows_.shift[1] = shift.y;
    rows_.flags = Rows<C>::kSeen | Rows<C>::kSeen << 1;  // or the unit has failed
    leave_prefix_rows(params_, slots, unit, rows_);
  }

  // Where the next unit begins.
  __device__ RingCursor<C::kStages> ring() const { return ring_; }

 private:
  using Panels = Lap<PrefixMap<C>::kPanels>;

  // P V of a tile's panel. The panel before is done by then, and with a tile's first one all of the tile before.
  template <int kPanel>
  __device__ __forceinline__ void add_panel(bool first) {
    barrier_wait(map_.panel_full(panel_.place), panel_.parity);
    const std::uint32_t p = of_warp(descriptor_low(map_.panel(panel_.place)));
    const std::uint32_t v = of_warp(descriptor_low(map_.v(ring_.stage()), cuda::panel_bytes(C::kKeyTile)));
    panel_.advance();
    pin(rows_.o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < panel_steps<C>(kPanel); ++step) {
      Wgmma<typename C::Element, C::kDimV>::sv(
          rows_.o, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>((4 * kPanel + step) * 16 * kPanelRowBytes >> 4)),
          step > 0 || !first);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (first) return;
    release_panel();
    if (kPanel == 0) release_values();
  }
  __device__ __forceinline__ void add_sums() {
    const float2 sum = load_pair(map_.sums(number_, thread_of_warpgroup()));
    rows_.l[0] = __fadd_rn(rows_.l[0], sum.x);
    rows_.l[1] = __fadd_rn(rows_.l[1], sum.y);
    __syncwarp();  // a lane says for all that the panel, and these with it, have been read
  }
  __device__ __forceinline__ void release_panel() {
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.panel_empty(released_panel_.place));
    released_panel_.advance();
  }
  __device__ __forceinline__ void release_values() {
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.v_empty(released_.stage()));
    released_.advance();
  }

  const DecodeParams& params_;
  const PrefixMap<C>& map_;
  RingCursor<C::kStages> ring_, released_;  // V of the next tile, and the next one to give back
  Panels panel_, released_panel_;
  std::uint32_t number_ = 0;  // of the next tile, of all units'
  Rows<C> rows_;
};

template <class C>
__device__ __forceinline__ void init_prefix_barriers(const PrefixMap<C>& map) {
  for (std::uint32_t i = 0; i < PrefixMap<C>::kPanels; ++i) {
    barrier_init(map.panel_full(i), kWarpgroup / 32);
    barrier_init(map.panel_empty(i), kWarpgroup / 32);
  }
  barrier_init(map.done(), 32 * kPrefixWarps<C>);
  init_decode_barriers<C>(map);
}

template <class C>
__global__ void __launch_bounds__(kPrefixThreads<C>, 1) prefix_kernel(const __grid_constant__ DecodeParams params) {
  const PrefixMap<C> map;
  using Registers = PrefixRegisters<C>;
  constexpr int kFetchWarp = (1 + C::kScorers) * kWarpgroup / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    init_prefix_barriers<C>(map);
    store_number(map.failed(), 0);
  }
  if (warp == kFetchWarp) bring_closer(params);
  await_kernels_before();
  // The launch behind this one reads nothing that this one writes, and what others have written, everyone sees by now.
  let_next_begin();
  if (warp == kFetchWarp) list_members<C>(params, map);
  __syncthreads();
  const int units = load_number(map.units_before(params.prefixes));
  const auto each_unit = [&](auto&& take) {
#pragma unroll 1
    for (int n = static_cast<int>(blockIdx.x); n < units; n += static_cast<int>(gridDim.x)) {
      take(prefix_unit_of<C>(params, map, n));
    }
  };
  // When all units are done, everyone knows whether one of them has failed. (Warps ask in different places, where no
  // barrier of the whole CTA may stand.)
  const auto any_failed = [&] {
    barrier_arrive(map.done());
    barrier_wait(map.done(), 0);
    return load_number(map.failed()) != 0;
  };
  if (warp < kWarpgroup / 32) {
    take_registers<Registers::kOutputs>();
    PrefixOutputs<C> outputs(params, map);
    each_unit([&](const PrefixUnit& unit) { outputs.take(unit); });
    if (!any_failed()) return;
    take_registers<Registers::kWhole>();
    PrefixFolder<C> folder(params, map, outputs.ring());
    each_unit([&](const PrefixUnit& unit) { folder.take(unit); });
  } else if (warp < kFetchWarp) {
    take_registers<Registers::kScores>();
    PrefixScorer<C> scorer(params, map, warp / (kWarpgroup / 32) - 1);
    each_unit([&](const PrefixUnit& unit) { scorer.take(unit); });
    if (!any_failed()) return;
    give_registers<Registers::kFetch>();
  } else {
    give_registers<Registers::kFetch>();
    const auto fetch = [&](auto fetcher) {
      const auto take = [&](const PrefixUnit& unit) { fetcher.take(unit.of); };
      each_unit(take);
      if (any_failed()) each_unit(take);
    };
    if (warp == kFetchWarp) {
      fetch(Fetcher<C, FetchedParts::kKeys>(params, map));
    } else if (warp == kFetchWarp + 1) {
      fetch(Fetcher<C, FetchedParts::kValues>(params, map));
    }
  }
}

}  // namespace ringattn::sm90
