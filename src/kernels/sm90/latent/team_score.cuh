// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a CTA of a team that scores every third or fourth tile, with the query rows in registers; and the
// warp that sends what comes of it to the others.
//
// A row's reference behind a tile hangs on the one before it and on the row's greatest score in the tile. So scorers
// tell all CTAs of their tiles' greatest scores, as soon as they have them, and everybody works references out by
// himself (references.cuh): no tile waits for a message that waited for another one. Sums of probabilities go with
// the probabilities, and whoever has outputs adds them up.
#pragma once

#include "kernels/sm90/latent/query_rows.cuh"
#include "kernels/sm90/latent/references.cuh"
#include "kernels/sm90/latent/team_map.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class TeamScorer {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ TeamScorer(const DecodeParams& params, const Map& map)
      : params_(params), p_(params.fold), map_(map) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    // The CTA's first keys and values are asked for behind its queries: all CTAs' keys take long to come.
    const auto tell_fetchers = [&] {
      if (!begun_ && thread_of_cta() % 32 == 0) barrier_arrive(map_.queries_asked());
      begun_ = true;
    };
    std::uint32_t tile = map_.first_own(first);
    if (static_cast<int>(tiles_ - tile) <= 0) {
      tell_fetchers();
      return;
    }
    const DecodeSlots slots = slots_of<C>(params_, unit, slot_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, unit);
    queries_.load(params_, unit, tell_fetchers);
    known_ = first;
    reference_[0] = reference_[1] = -INFINITY;
    const auto see = [&](LatentScores& s) {
      const int number = unit.begin + static_cast<int>(tile - first);
      see_scores<C>(p_, s, slots, number, number < plain.begin || number >= plain.end);
    };
    const auto is_of_unit = [&](std::uint32_t number) { return static_cast<int>(tiles_ - number) > 0; };
    LatentScores s;
    if constexpr (kBeginsNext) {
      begin_product(s, tile);
      end_product(s, tile);
      see(s);
#pragma unroll 1
      while (is_of_unit(tile + Map::kCtas)) {
        LatentScores next;
        weigh(s, tile, [&] { begin_product(next, tile + Map::kCtas); });
        tile += Map::kCtas;
        end_product(next, tile);
#pragma unroll
        for (int j = 0; j < kLatentTile / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[j][i] = next[j][i];
        }
        see(s);
      }
      weigh(s, tile, [] {});
    } else {
#pragma unroll 1
      for (; is_of_unit(tile); tile += Map::kCtas) {
        begin_product(s, tile);
        end_product(s, tile);
        see(s);
        weigh(s, tile, [] {});
      }
    }
  }

 private:
  static constexpr int kPartSteps = kTeamPartPanels * kPanelColumns / 16;
  // Whether the next tile's first products are issued while the others tell of their greatest scores. Teams of four
  // were slower with it (bench/notes/mla.md).
  static constexpr bool kBeginsNext = Map::kCtas == 3;

  // S = Q Kᵀ: the products of the tile's first part …
  __device__ __forceinline__ void begin_product(LatentScores& s, std::uint32_t tile) const {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 0);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kPartSteps>(s, map_.keys(n, 0));
  }
  // … and of the others. Then the tile's keys are given back.
  __device__ __forceinline__ void end_product(LatentScores& s, std::uint32_t tile) {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 1);
    wgmma_fence();
    queries_.template multiply<kPartSteps, 2 * kPartSteps>(s, map_.keys(n, 1));
    await(n, 2);
    wgmma_fence();
    queries_.template multiply<2 * kPartSteps, 3 * kPartSteps>(s, map_.keys(n, 2));
    wgmma_commit();
    // What the others have told so far, while the tensor cores are busy.
#pragma unroll 1
    while (known_ != tile && __all_sync(0xffffffffU, told(known_)) != 0) follow();
    wgmma_wait<0>();
    pin(s);
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < map_.teams) barrier_arrive_at(in_cta(map_.keys_empty(n % 2), map_.twin(lane)));
    __syncwarp();
  }

  // Scores become probabilities, which are handed over. meanwhile() is called when the others have been told of the
  // greatest ones, and before theirs are waited for.
  template <class Meanwhile>
  __device__ __forceinline__ void weigh(LatentScores& s, std::uint32_t tile, Meanwhile meanwhile) {
    float most[2], shift[2], sum[2];
    greatest_scores(p_, s, most);
    tell(most, tile);
    meanwhile();
#pragma unroll 1
    while (known_ != tile) {
      barrier_wait(map_.most_full(known_), Map::most_parity(known_));
      follow();
    }
    ++known_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference_[half] = reference_behind(reference_[half], most[half]);
      shift[half] = reference_[half] == -INFINITY ? 0.0F : -reference_[half];
    }
    exponentiate<C>(p_, shift, s, sum);
    LatentWeights probability;
    pack<C>(s, probability);
#pragma unroll
    for (auto& step : probability) {
#pragma unroll
      for (std::uint32_t& word : step) keep(word);  // made before the wait, not behind it
    }
    const std::uint32_t place = Map::weights_place(tile);
    const LatentTurn before = map_.weights_awaited(tile / Map::kCtas);
    barrier_wait(map_.weights_empty(before.place), before.parity);
    store_weights(map_.weights(place), probability);
    store_pair(map_.sums(place, thread_of_warpgroup()), sum[0], sum[1]);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.weights_full(tile));
    __syncwarp();
  }

  __device__ __forceinline__ void await(std::uint32_t n, std::uint32_t part) const {
    barrier_wait(map_.keys_full(n, part), Map::keys_parity(n, part));
  }

  // The greatest scores of a tile to all of the team: of the four threads that have a row, each tells one CTA.
  __device__ __forceinline__ void tell(const float (&most)[2], std::uint32_t tile) const {
    const int thread = thread_of_warpgroup();
    const auto to = static_cast<std::uint32_t>(thread % 4);
    const std::uint32_t place = map_.most(tile, thread);
    const std::uint32_t here = map_.most_full(tile), there = in_cta(here, map_.in_team(to));
    const bool own = to == map_.rank;
    if (own) {
      store_pair(place, most[0], most[1]);
    } else if (to < Map::kCtas) {
      send_pair(in_cta(place, map_.in_team(to)), there, most[0], most[1]);
    }
    __syncwarp();
    if (thread % 32 < static_cast<int>(Map::kCtas)) {
      if (own) {
        barrier_arrive(here);
      } else {
        barrier_arrive_expect_at(there, 32 / 4 * 8);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool told(std::uint32_t tile) const {
    return barrier_ended(map_.most_full(tile), Map::most_parity(tile));
  }
  // References behind the tile `known_`.
  __device__ __forceinline__ void follow() {
    const float2 most = load_pair(map_.most(known_, thread_of_warpgroup()));
    reference_[0] = reference_behind(reference_[0], most.x);
    reference_[1] = reference_behind(reference_[1], most.y);
    ++known_;
  }

  const DecodeParams& params_;
  const cuda::FoldParams& p_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // of all units so far
  bool begun_ = false;
  std::uint32_t known_ = 0;  // the tile in front of which reference_ stands
  float reference_[2];       // of this thread's rows
  QueryRows<C> queries_;
};

template <class Map>
class TeamSender {
 public:
  __device__ __forceinline__ explicit TeamSender(const Map& map) : map_(map) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
#pragma unroll 1
    for (std::uint32_t tile = map_.first_own(first); static_cast<int>(tiles_ - tile) > 0; tile += Map::kCtas) {
      const std::uint32_t from = of_warp(map_.weights(Map::weights_place(tile)));
      const std::uint32_t full = of_warp(map_.weights_full(tile));
      barrier_wait(full, Map::weights_parity(tile));
      if (one_of_warp()) {
#pragma unroll
        for (std::uint32_t i = 1; i < Map::kCtas; ++i) {
          const std::uint32_t to = map_.in_team((map_.rank + i) % Map::kCtas);
          send_bytes(in_cta(from, to), from, Map::kWeightBytes, in_cta(full, to));
        }
      }
      __syncwarp();
    }
  }

 private:
  const Map& map_;
  std::uint32_t tiles_ = 0;  // of all units so far
};

}  // namespace ringattn::sm90
