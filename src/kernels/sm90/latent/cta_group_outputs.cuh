// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a CTA of a cta_group that has some columns of a work_tile's outputs. It adds P V of every tile, in
// order, whoever has scored it, and works out softmax_offsets and l by itself (cta_group_score.cuh).
#pragma once

#include "kernels/sm90/latent/cta_group_map.cuh"
#include "kernels/sm90/latent/output_columns.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaGroupOutputs {
  using Map = typename C::Map;
  using Columns = OutputColumns<C, Map::kColumns>;

 public:
  __device__ __forceinline__ CtaGroupOutputs(const DecodeParams& params, const Map& map) : params_(params), map_(map) {}

  __device__ __forceinline__ void take(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    columns_.begin_work_tile();
    l_[0] = l_[1] = 0.0F;
    columns_.clear();  // also where the first product overwrites them: else the compiler keeps those of the work_tile
                       // before
    if (first != end) await_and_rescale(first);
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first, tiles_ + 1 == end,
          work_tile.of.length - (work_tile.begin + static_cast<int>(tiles_ - first)) * kMlaKeyTile);
    }
    columns_.store_rows(params_, work_tile, static_cast<int>(map_.rank) * Map::kColumns,
                        {sum_of_quad(l_[0]), sum_of_quad(l_[1])}, first != end);
  }

 private:
  // The softmax_offsets behind a tile whose greatest scores are here.
  __device__ __forceinline__ void rescale_to(std::uint32_t tile) {
    const float2 row_max = load_pair(map_.row_max(tile, thread_of_warpgroup()));
    moves_ = columns_.rescale_to(
        {offset_after(columns_.softmax_offset(0), row_max.x), offset_after(columns_.softmax_offset(1), row_max.y)});
  }
  __device__ __forceinline__ void await_and_rescale(std::uint32_t tile) {
    barrier_wait(map_.row_max_full(tile), Map::row_max_parity(tile));
    rescale_to(tile);
  }

  // O += P V of the next tile, whose softmax_offsets are known. `last`: of the work_tile; `keys`: of the sequence from
  // the tile's first one on.
  __device__ __forceinline__ void add(bool first, bool last, int keys) {
    const std::uint32_t probabilities = of_warp(Map::probabilities_stage(tiles_));
    const std::uint32_t stage = of_warp(stage_.stage());
    const std::uint32_t values = map_.values(stage);
    barrier_wait(map_.values_full(stage), stage_.parity());
    if (all_of_warp(keys < kMlaKeyTile)) columns_.clear_tail(values, keys);
    barrier_wait(map_.probabilities_full(tiles_), Map::probabilities_parity(tiles_));
    const float2 sum = load_pair(map_.sums(probabilities, thread_of_warpgroup()));
    columns_.scale(moves_);
    l_[0] = __fadd_rn(__fmul_rn(l_[0], moves_.factor[0]), sum.x);
    l_[1] = __fadd_rn(__fmul_rn(l_[1], moves_.factor[1]), sum.y);
    columns_.multiply(map_.probabilities(probabilities), values, first);
    // The next tile's softmax_offsets, while the tensor cores are busy; if they are not there yet, this tile's places
    // are given back before.
    const std::uint32_t next = tiles_ + 1;
    const bool early = !last && all_of_warp(barrier_ended(map_.row_max_full(next), Map::row_max_parity(next)));
    if (early) rescale_to(next);
    columns_.await();
    release(stage);
    stage_.advance();
    if (!last && !early) await_and_rescale(next);
  }

  // The stage of the tile's values, to all peer_ctas; that of its probabilities to its scorer.
  __device__ __forceinline__ void release(std::uint32_t stage) const {
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane <= map_.cta_groups) {
      const std::uint32_t scorer = tiles_ % Map::kCtas;
      barrier_arrive_at(lane == 0 ? in_cta(map_.probabilities_empty(Map::probabilities_released(tiles_).index),
                                           map_.in_cta_group(scorer))
                                  : in_cta(map_.values_empty(stage), map_.peer_cta(lane - 1)));
    }
    __syncwarp();
  }

  const DecodeParams& params_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // of all work_tiles so far
  PackedPipelineState<kCtaGroupValueStages> stage_;
  typename Columns::Moves moves_{};  // of the next tile
  float l_[2];                       // this thread's share of its rows'
  Columns columns_;
};

}  // namespace ringattn::sm90
