// SPDX-License-Identifier: Apache-2.0
// The sending warp of a CTA in a pair: sends softmax offsets and probabilities of the tiles that this CTA scores to the
// other CTA.
#pragma once

#include "kernels/mla/sm90/cta_pair_map.cuh"

namespace ringattn::sm90 {

class CtaPairSender {
 public:
  __device__ __forceinline__ explicit CtaPairSender(const CtaPairMap& map) : map_(map), peer_(1U - map.rank) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
#pragma unroll 1
    for (std::uint32_t tile = first + ((first ^ map_.rank) & 1U); static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const MlaPipelineState state = cta_pair_pipeline_state(tile);
      send_offsets(state);
      send_probabilities(state);
    }
  }

 private:
  // Each lane sends the offsets of two rows.
  __device__ __forceinline__ void send_offsets(const MlaPipelineState& state) const {
    static_assert(kQueryTile == 2 * 32);
    const int lane = thread_of_cta() % 32;
    const std::uint32_t barrier = map_to_cta(map_.softmax_offsets_full(false, state.index), peer_);
    const std::uint32_t to = map_to_cta(map_.softmax_offsets(false, state.index, 4 * lane), peer_);
    barrier_wait(map_.softmax_offsets_full(true, state.index), state.parity);
    const float2 pair = load_pair(map_.softmax_offsets(true, state.index, 4 * lane));
    dsmem_store_pair_async(to, barrier, pair.x, pair.y);
    if (lane == 0) barrier_arrive_expect_at(barrier, kQueryTile * 4);
    __syncwarp();
  }

  __device__ __forceinline__ void send_probabilities(const MlaPipelineState& state) const {
    const std::uint32_t barrier = map_to_cta(map_.probabilities_full(false, state.index), peer_);
    const std::uint32_t to = map_to_cta(map_.probabilities(false, state.index), peer_);
    barrier_wait(map_.probabilities_full(true, state.index), state.parity);
    if (thread_of_cta() % 32 == 0) {
      dsmem_copy(to, map_.probabilities(true, state.index), kQueryTile * kPanelRowBytes, barrier);
    }
    __syncwarp();
  }

  const CtaPairMap& map_;
  const std::uint32_t peer_;  // rank of the other CTA
  std::uint32_t tiles_ = 0;   // over all work tiles so far
};

}  // namespace ringattn::sm90
