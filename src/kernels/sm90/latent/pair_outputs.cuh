// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a pair's CTA that has outputs: half of the columns of a unit's 64 rows, in registers. It adds P V of
// every tile, in order, whoever has scored it.
#pragma once

#include "kernels/sm90/latent/output_columns.cuh"
#include "kernels/sm90/latent/pair_map.cuh"

namespace ringattn::sm90 {

template <class C>
class PairOutputs {
 public:
  __device__ __forceinline__ PairOutputs(const DecodeParams& params, const PairMap& map) : params_(params), map_(map) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(unit.end - unit.begin);
    columns_.begin_unit();
    if (first == end) columns_.clear();
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first, unit.of.length - (unit.begin + static_cast<int>(tiles_ - first)) * kLatentTile);
    }
    float sum[2] = {0.0F, 0.0F};
    if (first != end) read_ends(sum);
    columns_.leave_rows(params_, unit, static_cast<int>(map_.rank) * kPairColumns, sum, first != end);
  }

 private:
  // O += P V of the next tile. `keys`: of the sequence from the tile's first one on.
  __device__ __forceinline__ void add(bool first, int keys) {
    const LatentTurn turn = pair_turn(tiles_);
    const bool own = ((tiles_ ^ map_.rank) & 1U) == 0;
    const std::uint32_t values = map_.values(own, turn.place);
    barrier_wait(map_.values_full(own, turn.place), turn.parity);
    // Before the probabilities: what there is to do for a reference is done when they come. Whoever has sent references
    // has done with the keys, so that nobody else reads these columns.
    barrier_wait(map_.references_full(own, turn.place), turn.parity);
    const float2 pair = load_pair(map_.references(own, turn.place, thread_of_warpgroup()));
    columns_.scale(columns_.follow({pair.x, pair.y}));
    if (all_of_warp(keys < kLatentTile)) columns_.clear_tail(values, keys);
    barrier_wait(map_.weights_full(own, turn.place), turn.parity);
    columns_.multiply(map_.weights(own, turn.place), values, first);
    columns_.await();
    if (thread_of_cta() % 32 == 0) {
      if (own) {
        barrier_arrive(map_.own_empty(turn.place));
      } else {
        barrier_arrive_at(in_cta(map_.shared_empty(turn.place), 1U - map_.rank));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void read_ends(float (&sum)[2]) {
    const LatentTurn turn = LatentTurn::of(units_);
    barrier_wait(map_.ends_full(turn.place), turn.parity);
    ++units_;
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = load_float(map_.end(turn.place, slot_of_thread() + 8 * half));
    __syncwarp();
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < 2) barrier_arrive_at(in_cta(map_.ends_empty(turn.place), lane));
    __syncwarp();
  }

  const DecodeParams& params_;
  const PairMap& map_;
  std::uint32_t tiles_ = 0;  // of all units so far
  std::uint32_t units_ = 0;  // that have tiles
  OutputColumns<C, kPairColumns> columns_;
};

}  // namespace ringattn::sm90
