// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a CTA of a team that has some columns of a unit's outputs. It adds P V of every tile, in order,
// whoever has scored it, and works out references and l by itself (team_score.cuh).
#pragma once

#include "kernels/sm90/latent/output_columns.cuh"
#include "kernels/sm90/latent/team_map.cuh"

namespace ringattn::sm90 {

template <class C>
class TeamOutputs {
  using Map = typename C::Map;
  using Columns = OutputColumns<C, Map::kColumns>;

 public:
  __device__ __forceinline__ TeamOutputs(const DecodeParams& params, const Map& map) : params_(params), map_(map) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(unit.end - unit.begin);
    columns_.begin_unit();
    l_[0] = l_[1] = 0.0F;
    columns_.clear();  // also where the first product overwrites them: else the compiler keeps those of the unit before
    if (first != end) await_and_follow(first);
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first, tiles_ + 1 == end,
          unit.of.length - (unit.begin + static_cast<int>(tiles_ - first)) * kLatentTile);
    }
    columns_.leave_rows(params_, unit, static_cast<int>(map_.rank) * Map::kColumns,
                        {sum_of_quad(l_[0]), sum_of_quad(l_[1])}, first != end);
  }

 private:
  // The references behind a tile whose greatest scores are here.
  __device__ __forceinline__ void follow(std::uint32_t tile) {
    const float2 most = load_pair(map_.most(tile, thread_of_warpgroup()));
    moves_ = columns_.follow(
        {reference_behind(columns_.reference(0), most.x), reference_behind(columns_.reference(1), most.y)});
  }
  __device__ __forceinline__ void await_and_follow(std::uint32_t tile) {
    barrier_wait(map_.most_full(tile), Map::most_parity(tile));
    follow(tile);
  }

  // O += P V of the next tile, whose references are known. `last`: of the unit; `keys`: of the sequence from the tile's
  // first one on.
  __device__ __forceinline__ void add(bool first, bool last, int keys) {
    const std::uint32_t weights = of_warp(Map::weights_place(tiles_));
    const std::uint32_t place = of_warp(place_.stage());
    const std::uint32_t values = map_.values(place);
    barrier_wait(map_.values_full(place), place_.parity());
    if (all_of_warp(keys < kLatentTile)) columns_.clear_tail(values, keys);
    barrier_wait(map_.weights_full(tiles_), Map::weights_parity(tiles_));
    const float2 sum = load_pair(map_.sums(weights, thread_of_warpgroup()));
    columns_.scale(moves_);
    l_[0] = __fadd_rn(__fmul_rn(l_[0], moves_.factor[0]), sum.x);
    l_[1] = __fadd_rn(__fmul_rn(l_[1], moves_.factor[1]), sum.y);
    columns_.multiply(map_.weights(weights), values, first);
    // The next tile's references, while the tensor cores are busy; if they are not there yet, this tile's places are
    // given back before.
    const std::uint32_t next = tiles_ + 1;
    const bool early = !last && all_of_warp(barrier_ended(map_.most_full(next), Map::most_parity(next)));
    if (early) follow(next);
    columns_.await();
    release(place);
    place_.advance();
    if (!last && !early) await_and_follow(next);
  }

  // The place of the tile's values, to all twins; that of its weights to its scorer.
  __device__ __forceinline__ void release(std::uint32_t place) const {
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane <= map_.teams) {
      const std::uint32_t scorer = tiles_ % Map::kCtas;
      barrier_arrive_at(lane == 0 ? in_cta(map_.weights_empty(Map::weights_left(tiles_).place), map_.in_team(scorer))
                                  : in_cta(map_.values_empty(place), map_.twin(lane - 1)));
    }
    __syncwarp();
  }

  const DecodeParams& params_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // of all units so far
  RingCursor<kTeamValuePlaces> place_;
  typename Columns::Moves moves_{};  // of the next tile
  float l_[2];                       // this thread's share of its rows'
  Columns columns_;
};

}  // namespace ringattn::sm90
