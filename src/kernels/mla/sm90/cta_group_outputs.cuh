// SPDX-License-Identifier: Apache-2.0
// The output warpgroup of a CTA in a CTA group: some columns of a work tile's outputs. It adds P V of every tile in
// order, whichever CTA has scored it, and computes softmax offsets and sums itself (cta_group_score.cuh).
#pragma once

#include "kernels/mla/sm90/cta_group_map.cuh"
#include "kernels/mla/sm90/output_columns.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaGroupOutputs {
  using Map = typename C::Map;
  using Columns = OutputColumns<C, Map::kColumns>;

 public:
  __device__ __forceinline__ CtaGroupOutputs(const DecodeParams& params, const Map& map) : params_(params), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    columns_.begin_work_tile();
    l_[0] = l_[1] = 0.0F;
    columns_.clear();  // needed even if the first MMA overwrites them: else the compiler keeps the last outputs live
    if (first != end) await_offsets(first);
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first, tiles_ + 1 == end,
          work_tile.seq_info.length - (work_tile.begin + static_cast<int>(tiles_ - first)) * kMlaKeyTile);
    }
    columns_.store_rows(params_, work_tile, static_cast<int>(map_.rank) * Map::kColumns,
                        {sum_of_quad(l_[0]), sum_of_quad(l_[1])}, first != end);
  }

 private:
  // Updates the softmax offsets with the row maxima of a tile, which have arrived.
  __device__ __forceinline__ void update_offsets(std::uint32_t tile) {
    const float2 row_max = load_pair(map_.row_max(tile, thread_of_warpgroup()));
    rescale_ = columns_.update_offsets(
        {offset_after(columns_.softmax_offset(0), row_max.x), offset_after(columns_.softmax_offset(1), row_max.y)});
  }
  __device__ __forceinline__ void await_offsets(std::uint32_t tile) {
    barrier_wait(map_.row_max_full(tile), Map::row_max_parity(tile));
    update_offsets(tile);
  }

  // O += P V of the next tile, whose softmax offsets are known. `last`: of the work tile. `keys`: keys of the sequence
  // from the tile's first key on.
  __device__ __forceinline__ void add(bool first, bool last, int keys) {
    const std::uint32_t probabilities = warp_uniform(Map::probabilities_stage(tiles_));
    const std::uint32_t stage = warp_uniform(stage_.stage());
    const std::uint32_t values = map_.values(stage);
    barrier_wait(map_.values_full(stage), stage_.parity());
    if (all_of_warp(keys < kMlaKeyTile)) columns_.clear_tail(values, keys);
    barrier_wait(map_.probabilities_full(tiles_), Map::probabilities_parity(tiles_));
    const float2 sum = load_pair(map_.sums(probabilities, thread_of_warpgroup()));
    columns_.scale(rescale_);
    l_[0] = __fadd_rn(__fmul_rn(l_[0], rescale_.factor[0]), sum.x);
    l_[1] = __fadd_rn(__fmul_rn(l_[1], rescale_.factor[1]), sum.y);
    columns_.multiply(map_.probabilities(probabilities), values, first);
    // Computes the next tile's softmax offsets during the MMAs, if its row maxima are here. If not, releases this
    // tile's stages first.
    const std::uint32_t next = tiles_ + 1;
    const bool early = !last && all_of_warp(barrier_ended(map_.row_max_full(next), Map::row_max_parity(next)));
    if (early) update_offsets(next);
    columns_.await();
    release(stage);
    stage_.advance();
    if (!last && !early) await_offsets(next);
  }

  // Releases the stage of values to all peers, and the stage of probabilities to the tile's scorer.
  __device__ __forceinline__ void release(std::uint32_t stage) const {
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane <= map_.cta_groups) {
      const std::uint32_t scorer = tiles_ % Map::kCtas;
      barrier_arrive_at(lane == 0 ? map_to_cta(map_.probabilities_empty(Map::probabilities_released(tiles_).index),
                                               map_.in_cta_group(scorer))
                                  : map_to_cta(map_.values_empty(stage), map_.peer_cta(lane - 1)));
    }
    __syncwarp();
  }

  const DecodeParams& params_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
  PackedPipelineState<kCtaGroupValueStages> stage_;
  typename Columns::Rescale rescale_{};  // factors before the next tile is added
  float l_[2];                           // this thread's addend of its rows' sums
  Columns columns_;
};

}  // namespace ringattn::sm90
