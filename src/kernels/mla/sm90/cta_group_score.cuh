// SPDX-License-Identifier: Apache-2.0
// The scoring warpgroup of a CTA in a CTA group, which scores every third or fourth tile with the queries in registers,
// and the warp that sends the probabilities to the other CTAs.
//
// The softmax offset of a row depends on the previous tile's offset and on the row's maximum score in the tile. Scorers
// send the row maxima of their tiles to all CTAs as soon as they have them, and each CTA computes the offsets itself
// (softmax_offsets.cuh). So no tile waits for a message that depends on another message. Row sums are sent with the
// probabilities, and the output warpgroups add them up.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/mla/sm90/cta_group_map.cuh"
#include "kernels/mla/sm90/query_rows.cuh"
#include "kernels/mla/sm90/softmax_offsets.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaGroupScorer {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ CtaGroupScorer(const DecodeParams& params, const Map& map)
      : params_(params), p_(params.attention), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    // The CTA's first keys and values are loaded after its queries: with the loads of all CTAs in flight, they arrive
    // late.
    const auto arrive_producers = [&] {
      if (!started_ && thread_of_cta() % 32 == 0) barrier_arrive(map_.queries_issued());
      started_ = true;
    };
    std::uint32_t tile = map_.first_own(first);
    if (static_cast<int>(tiles_ - tile) <= 0) {
      arrive_producers();
      return;
    }
    const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
    queries_.load(params_, work_tile, arrive_producers);
    offset_tile_ = first;
    softmax_offset_[0] = softmax_offset_[1] = -INFINITY;
    const auto mask = [&](MlaScores& s) {
      const int number = work_tile.begin + static_cast<int>(tile - first);
      scale_and_mask<C>(p_, s, thread_rows, number, number < plain.begin || number >= plain.end);
    };
    const auto is_of_work_tile = [&](std::uint32_t number) { return static_cast<int>(tiles_ - number) > 0; };
    MlaScores s;
    if constexpr (kOverlapsNextGemm) {
      begin_gemm(s, tile);
      end_gemm(s, tile);
      mask(s);
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
        mask(s);
      }
      softmax_step(s, tile, [] {});
    } else {
#pragma unroll 1
      for (; is_of_work_tile(tile); tile += Map::kCtas) {
        begin_gemm(s, tile);
        end_gemm(s, tile);
        mask(s);
        softmax_step(s, tile, [] {});
      }
    }
  }

 private:
  static constexpr int kPartSteps = kCtaGroupPartPanels * kPanelColumns / 16;
  // True if the next tile's first MMAs are issued while the row maxima are in flight. CTA groups of four were slower
  // with it (bench/notes/mla.md).
  static constexpr bool kOverlapsNextGemm = Map::kCtas == 3;

  // Issues S = Q Kᵀ for the tile's first column part.
  __device__ __forceinline__ void begin_gemm(MlaScores& s, std::uint32_t tile) const {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 0);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kPartSteps>(s, map_.keys(n, 0));
  }
  // Issues the other column parts, waits, and releases the tile's keys.
  __device__ __forceinline__ void end_gemm(MlaScores& s, std::uint32_t tile) {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 1);
    wgmma_fence();
    queries_.template multiply<kPartSteps, 2 * kPartSteps>(s, map_.keys(n, 1));
    await(n, 2);
    wgmma_fence();
    queries_.template multiply<2 * kPartSteps, 3 * kPartSteps>(s, map_.keys(n, 2));
    wgmma_commit();
    // Uses the row maxima that have arrived, during the MMAs.
#pragma unroll 1
    while (offset_tile_ != tile && __all_sync(0xffffffffU, row_max_arrived(offset_tile_)) != 0) update_offsets();
    wgmma_wait<0>();
    pin(s);
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < map_.cta_groups) barrier_arrive_at(map_to_cta(map_.keys_empty(n % 2), map_.peer_cta(lane)));
    __syncwarp();
  }

  // Computes probabilities from scores and stores them for the sender. meanwhile() is called after the row maxima are
  // sent, before those of other CTAs are waited for.
  template <class Meanwhile>
  __device__ __forceinline__ void softmax_step(MlaScores& s, std::uint32_t tile, Meanwhile meanwhile) {
    float row_max[2], shift[2], sum[2];
    max_scores(p_, s, row_max);
    send(row_max, tile);
    meanwhile();
#pragma unroll 1
    while (offset_tile_ != tile) {
      barrier_wait(map_.row_max_full(offset_tile_), Map::row_max_parity(offset_tile_));
      update_offsets();
    }
    ++offset_tile_;
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
      for (std::uint32_t& word : step) keep(word);  // computed before the wait, not after it
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

  // Sends the row maxima of a tile to all CTAs of the group. Each of the four threads of a row sends to one CTA.
  __device__ __forceinline__ void send(const float (&row_max)[2], std::uint32_t tile) const {
    const int thread = thread_of_warpgroup();
    const auto to = static_cast<std::uint32_t>(thread % 4);
    const std::uint32_t address = map_.row_max(tile, thread);
    const std::uint32_t here = map_.row_max_full(tile), there = map_to_cta(here, map_.in_cta_group(to));
    const bool own = to == map_.rank;
    if (own) {
      store_pair(address, row_max[0], row_max[1]);
    } else if (to < Map::kCtas) {
      dsmem_store_pair_async(map_to_cta(address, map_.in_cta_group(to)), there, row_max[0], row_max[1]);
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

  __device__ __forceinline__ bool row_max_arrived(std::uint32_t tile) const {
    return barrier_ended(map_.row_max_full(tile), Map::row_max_parity(tile));
  }
  // Updates the softmax offsets with the row maxima of tile offset_tile_.
  __device__ __forceinline__ void update_offsets() {
    const float2 row_max = load_pair(map_.row_max(offset_tile_, thread_of_warpgroup()));
    softmax_offset_[0] = offset_after(softmax_offset_[0], row_max.x);
    softmax_offset_[1] = offset_after(softmax_offset_[1], row_max.y);
    ++offset_tile_;
  }

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
  bool started_ = false;
  std::uint32_t offset_tile_ = 0;  // softmax_offset_ includes all tiles before this one
  float softmax_offset_[2];        // of this thread's rows
  QueryRows<C> queries_;
};

// Sends probabilities and row sums of the tiles that this CTA scores to the other CTAs of the group. By one warp.
template <class Map>
class CtaGroupSender {
 public:
  __device__ __forceinline__ explicit CtaGroupSender(const Map& map) : map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
#pragma unroll 1
    for (std::uint32_t tile = map_.first_own(first); static_cast<int>(tiles_ - tile) > 0; tile += Map::kCtas) {
      const std::uint32_t from = warp_uniform(map_.probabilities(Map::probabilities_stage(tile)));
      const std::uint32_t full = warp_uniform(map_.probabilities_full(tile));
      barrier_wait(full, Map::probabilities_parity(tile));
      if (elect_one()) {
#pragma unroll
        for (std::uint32_t i = 1; i < Map::kCtas; ++i) {
          const std::uint32_t to = map_.in_cta_group((map_.rank + i) % Map::kCtas);
          dsmem_copy(map_to_cta(from, to), from, Map::kProbabilityBytes, map_to_cta(full, to));
        }
      }
      __syncwarp();
    }
  }

 private:
  const Map& map_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

}  // namespace ringattn::sm90
