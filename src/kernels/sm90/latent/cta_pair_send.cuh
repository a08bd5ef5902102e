// SPDX-License-Identifier: Apache-2.0
// The warp of a pair's CTA that sends what this CTA has scored to the other one: softmax_offsets and probabilities.
#pragma once

#include "kernels/sm90/latent/cta_pair_map.cuh"

namespace ringattn::sm90 {

class CtaPairSender {
 public:
  __device__ __forceinline__ explicit CtaPairSender(const CtaPairMap& map) : map_(map), other_(1U - map.rank) {}

  __device__ __forceinline__ void take(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
#pragma unroll 1
    for (std::uint32_t tile = first + ((first ^ map_.rank) & 1U); static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const MlaPipelineState turn = cta_pair_pipeline_state(tile);
      send_offsets(turn);
      send_probabilities(turn);
    }
  }

 private:
  // A lane sends those of two rows.
  __device__ __forceinline__ void send_offsets(const MlaPipelineState& turn) const {
    static_assert(kQueryTile == 2 * 32);
    const int lane = thread_of_cta() % 32;
    const std::uint32_t barrier = in_cta(map_.softmax_offsets_full(false, turn.index), other_);
    const std::uint32_t to = in_cta(map_.softmax_offsets(false, turn.index, 4 * lane), other_);
    barrier_wait(map_.softmax_offsets_full(true, turn.index), turn.parity);
    const float2 pair = load_pair(map_.softmax_offsets(true, turn.index, 4 * lane));
    dsmem_store_pair_async(to, barrier, pair.x, pair.y);
    if (lane == 0) barrier_arrive_expect_at(barrier, kQueryTile * 4);
    __syncwarp();
  }

  __device__ __forceinline__ void send_probabilities(const MlaPipelineState& turn) const {
    const std::uint32_t barrier = in_cta(map_.probabilities_full(false, turn.index), other_);
    const std::uint32_t to = in_cta(map_.probabilities(false, turn.index), other_);
    barrier_wait(map_.probabilities_full(true, turn.index), turn.parity);
    if (thread_of_cta() % 32 == 0) {
      dsmem_copy(to, map_.probabilities(true, turn.index), kQueryTile * kPanelRowBytes, barrier);
    }
    __syncwarp();
  }

  const CtaPairMap& map_;
  const std::uint32_t other_;  // rank of the other CTA
  std::uint32_t tiles_ = 0;    // of all work_tiles so far
};

}  // namespace ringattn::sm90
