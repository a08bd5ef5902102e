// SPDX-License-Identifier: Apache-2.0
// The warp of a pair's CTA that sends what this CTA has scored to the other one: references and probabilities.
#pragma once

#include "kernels/sm90/latent/pair_map.cuh"

namespace ringattn::sm90 {

class PairSender {
 public:
  __device__ __forceinline__ explicit PairSender(const PairMap& map) : map_(map), other_(1U - map.rank) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
#pragma unroll 1
    for (std::uint32_t tile = first + ((first ^ map_.rank) & 1U); static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const LatentTurn turn = pair_turn(tile);
      send_references(turn);
      send_weights(turn);
    }
  }

 private:
  // A lane sends those of two rows.
  __device__ __forceinline__ void send_references(const LatentTurn& turn) const {
    static_assert(kQueryTile == 2 * 32);
    const int lane = thread_of_cta() % 32;
    const std::uint32_t barrier = in_cta(map_.references_full(false, turn.place), other_);
    const std::uint32_t to = in_cta(map_.references(false, turn.place, 4 * lane), other_);
    barrier_wait(map_.references_full(true, turn.place), turn.parity);
    const float2 pair = load_pair(map_.references(true, turn.place, 4 * lane));
    send_pair(to, barrier, pair.x, pair.y);
    if (lane == 0) barrier_arrive_expect_at(barrier, kQueryTile * 4);
    __syncwarp();
  }

  __device__ __forceinline__ void send_weights(const LatentTurn& turn) const {
    const std::uint32_t barrier = in_cta(map_.weights_full(false, turn.place), other_);
    const std::uint32_t to = in_cta(map_.weights(false, turn.place), other_);
    barrier_wait(map_.weights_full(true, turn.place), turn.parity);
    if (thread_of_cta() % 32 == 0) {
      send_bytes(to, map_.weights(true, turn.place), kQueryTile * kPanelRowBytes, barrier);
    }
    __syncwarp();
  }

  const PairMap& map_;
  const std::uint32_t other_;  // rank of the other CTA
  std::uint32_t tiles_ = 0;    // of all units so far
};

}  // namespace ringattn::sm90
