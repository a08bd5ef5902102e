// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a CTA of a cta_group that scores every third or fourth tile, with the query rows in registers; and
// the warp that sends what comes of it to the others.
//
// A row's softmax_offset behind a tile hangs on the one before it and on the row's greatest score in the tile. So
// scorers send all CTAs of their tiles' greatest scores, as soon as they have them, and everybody works softmax_offsets
// out by himself (softmax_offsets.cuh): no tile waits for a message that waited for another one. Sums of probabilities
// go with the probabilities, and whoever has outputs adds them up.
#pragma once

#include "kernels/sm90/latent/cta_group_map.cuh"
#include "kernels/sm90/latent/query_rows.cuh"
#include "kernels/sm90/latent/softmax_offsets.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaGroupScorer {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ CtaGroupScorer(const DecodeParams& params, const Map& map)
      : params_(params), p_(params.attention), map_(map) {}

  __device__ __forceinline__ void take(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    // The CTA's first keys and values are asked for behind its queries: all CTAs' keys take long to come.
    const auto arrive_producers = [&] {
      if (!begun_ && thread_of_cta() % 32 == 0) barrier_arrive(map_.queries_asked());
      begun_ = true;
    };
    std::uint32_t tile = map_.first_own(first);
    if (static_cast<int>(tiles_ - tile) <= 0) {
      arrive_producers();
      return;
    }
    const ThreadRows slots = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
    queries_.load(params_, work_tile, arrive_producers);
    known_ = first;
    softmax_offset_[0] = softmax_offset_[1] = -INFINITY;
    const auto see = [&](MlaScores& s) {
      const int number = work_tile.begin + static_cast<int>(tile - first);
      see_scores<C>(p_, s, slots, number, number < plain.begin || number >= plain.end);
    };
    const auto is_of_work_tile = [&](std::uint32_t number) { return static_cast<int>(tiles_ - number) > 0; };
    MlaScores s;
    if constexpr (kBeginsNext) {
      begin_gemm(s, tile);
      end_gemm(s, tile);
      see(s);
#pragma unroll 1
      while (is_of_work_tile(tile + Map::kCtas)) {
        MlaScores next;
        softmax_step(s, tile, [&] { begin_gemm(next, tile + Map::kCtas); });
        tile += Map::kCtas;
        end_gemm(next, tile);
#pragma unroll
        for (int j = 0; j < kMlaKeyTile / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[j][i] = next[j][i];
        }
        see(s);
      }
      softmax_step(s, tile, [] {});
    } else {
#pragma unroll 1
      for (; is_of_work_tile(tile); tile += Map::kCtas) {
        begin_gemm(s, tile);
        end_gemm(s, tile);
        see(s);
        softmax_step(s, tile, [] {});
      }
    }
  }

 private:
  static constexpr int kPartSteps = kCtaGroupPartPanels * kPanelColumns / 16;
  // Whether the next tile's first products are issued while the others send of their greatest scores. Teams of four
  // were slower with it (bench/notes/mla.md).
  static constexpr bool kBeginsNext = Map::kCtas == 3;

  // S = Q Kᵀ: the products of the tile's first part …
  __device__ __forceinline__ void begin_gemm(MlaScores& s, std::uint32_t tile) const {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 0);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kPartSteps>(s, map_.keys(n, 0));
  }
  // … and of the others. Then the tile's keys are given back.
  __device__ __forceinline__ void end_gemm(MlaScores& s, std::uint32_t tile) {
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
    while (known_ != tile && __all_sync(0xffffffffU, told(known_)) != 0) rescale_to();
    wgmma_wait<0>();
    pin(s);
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < map_.cta_groups) barrier_arrive_at(in_cta(map_.keys_empty(n % 2), map_.peer_cta(lane)));
    __syncwarp();
  }

  // Scores become probabilities, which are handed over. meanwhile() is called when the others have been told of the
  // greatest ones, and before theirs are waited for.
  template <class Meanwhile>
  __device__ __forceinline__ void softmax_step(MlaScores& s, std::uint32_t tile, Meanwhile meanwhile) {
    float row_max[2], shift[2], sum[2];
    greatest_scores(p_, s, row_max);
    send(row_max, tile);
    meanwhile();
#pragma unroll 1
    while (known_ != tile) {
      barrier_wait(map_.row_max_full(known_), Map::row_max_parity(known_));
      rescale_to();
    }
    ++known_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax_offset_[half] = offset_after(softmax_offset_[half], row_max[half]);
      shift[half] = softmax_offset_[half] == -INFINITY ? 0.0F : -softmax_offset_[half];
    }
    exponentiate<C>(p_, shift, s, sum);
    MlaProbabilities probability;
    pack<C>(s, probability);
#pragma unroll
    for (auto& step : probability) {
#pragma unroll
      for (std::uint32_t& word : step) keep(word);  // made before the wait, not behind it
    }
    const std::uint32_t stage = Map::probabilities_stage(tile);
    const MlaPipelineState before = map_.probabilities_acquired(tile / Map::kCtas);
    barrier_wait(map_.probabilities_empty(before.index), before.parity);
    store_probabilities(map_.probabilities(stage), probability);
    store_pair(map_.sums(stage, thread_of_warpgroup()), sum[0], sum[1]);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.probabilities_full(tile));
    __syncwarp();
  }

  __device__ __forceinline__ void await(std::uint32_t n, std::uint32_t part) const {
    barrier_wait(map_.keys_full(n, part), Map::keys_parity(n, part));
  }

  // The greatest scores of a tile to all of the cta_group: of the four threads that have a row, each tells one CTA.
  __device__ __forceinline__ void send(const float (&row_max)[2], std::uint32_t tile) const {
    const int thread = thread_of_warpgroup();
    const auto to = static_cast<std::uint32_t>(thread % 4);
    const std::uint32_t address = map_.row_max(tile, thread);
    const std::uint32_t here = map_.row_max_full(tile), there = in_cta(here, map_.in_cta_group(to));
    const bool own = to == map_.rank;
    if (own) {
      store_pair(address, row_max[0], row_max[1]);
    } else if (to < Map::kCtas) {
      dsmem_store_pair_async(in_cta(address, map_.in_cta_group(to)), there, row_max[0], row_max[1]);
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
    return barrier_ended(map_.row_max_full(tile), Map::row_max_parity(tile));
  }
  // References behind the tile `known_`.
  __device__ __forceinline__ void rescale_to() {
    const float2 row_max = load_pair(map_.row_max(known_, thread_of_warpgroup()));
    softmax_offset_[0] = offset_after(softmax_offset_[0], row_max.x);
    softmax_offset_[1] = offset_after(softmax_offset_[1], row_max.y);
    ++known_;
  }

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // of all work_tiles so far
  bool begun_ = false;
  std::uint32_t known_ = 0;  // the tile in front of which softmax_offset_ stands
  float softmax_offset_[2];  // of this thread's rows
  QueryRows<C> queries_;
};

template <class Map>
class CtaGroupSender {
 public:
  __device__ __forceinline__ explicit CtaGroupSender(const Map& map) : map_(map) {}

  __device__ __forceinline__ void take(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
#pragma unroll 1
    for (std::uint32_t tile = map_.first_own(first); static_cast<int>(tiles_ - tile) > 0; tile += Map::kCtas) {
      const std::uint32_t from = of_warp(map_.probabilities(Map::probabilities_stage(tile)));
      const std::uint32_t full = of_warp(map_.probabilities_full(tile));
      barrier_wait(full, Map::probabilities_parity(tile));
      if (elect_one()) {
#pragma unroll
        for (std::uint32_t i = 1; i < Map::kCtas; ++i) {
          const std::uint32_t to = map_.in_cta_group((map_.rank + i) % Map::kCtas);
          dsmem_copy(in_cta(from, to), from, Map::kProbabilityBytes, in_cta(full, to));
        }
      }
      __syncwarp();
    }
  }

 private:
  const Map& map_;
  std::uint32_t tiles_ = 0;  // of all work_tiles so far
};

}  // namespace ringattn::sm90
