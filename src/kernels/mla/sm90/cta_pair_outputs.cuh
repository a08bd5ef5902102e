// SPDX-License-Identifier: Apache-2.0
// The output warpgroup of a CTA in a pair: half of the output columns of a work tile's 64 rows, in registers. It adds P
// V of every tile in order, whichever CTA has scored it.
#pragma once

#include "kernels/mla/sm90/cta_pair_map.cuh"
#include "kernels/mla/sm90/output_columns.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaPairOutputs {
 public:
  __device__ __forceinline__ CtaPairOutputs(const DecodeParams& params, const CtaPairMap& map)
      : params_(params), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    columns_.begin_work_tile();
    if (first == end) columns_.clear();
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first,
          work_tile.seq_info.length - (work_tile.begin + static_cast<int>(tiles_ - first)) * kMlaKeyTile);
    }
    float sum[2] = {0.0F, 0.0F};
    if (first != end) read_final_sums(sum);
    columns_.store_rows(params_, work_tile, static_cast<int>(map_.rank) * kCtaPairColumns, sum, first != end);
  }

 private:
  // O += P V of the next tile. `keys`: keys of the sequence from the tile's first key on.
  __device__ __forceinline__ void add(bool first, int keys) {
    const MlaPipelineState state = cta_pair_pipeline_state(tiles_);
    const bool own = ((tiles_ ^ map_.rank) & 1U) == 0;
    const std::uint32_t values = map_.values(own, state.index);
    barrier_wait(map_.values_full(own, state.index), state.parity);
    // Offsets are waited for before the probabilities, so that rescaling is done when these arrive. The sender of the
    // offsets has read the keys, so no other warp reads these columns.
    barrier_wait(map_.softmax_offsets_full(own, state.index), state.parity);
    const float2 pair = load_pair(map_.softmax_offsets(own, state.index, thread_of_warpgroup()));
    columns_.scale(columns_.update_offsets({pair.x, pair.y}));
    if (all_of_warp(keys < kMlaKeyTile)) columns_.clear_tail(values, keys);
    barrier_wait(map_.probabilities_full(own, state.index), state.parity);
    columns_.multiply(map_.probabilities(own, state.index), values, first);
    columns_.await();
    if (thread_of_cta() % 32 == 0) {
      if (own) {
        barrier_arrive(map_.own_empty(state.index));
      } else {
        barrier_arrive_at(map_to_cta(map_.shared_empty(state.index), 1U - map_.rank));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void read_final_sums(float (&sum)[2]) {
    const MlaPipelineState state = MlaPipelineState::of(work_tiles_);
    barrier_wait(map_.final_sums_full(state.index), state.parity);
    ++work_tiles_;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = load_float(map_.final_sum(state.index, tile_row_of_thread() + 8 * half));
    __syncwarp();
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < 2) barrier_arrive_at(map_to_cta(map_.final_sums_empty(state.index), lane));
    __syncwarp();
  }

  const DecodeParams& params_;
  const CtaPairMap& map_;
  std::uint32_t tiles_ = 0;       // over all work tiles so far
  std::uint32_t work_tiles_ = 0;  // non-empty work tiles so far
  OutputColumns<C, kCtaPairColumns> columns_;
};

}  // namespace ringattn::sm90
