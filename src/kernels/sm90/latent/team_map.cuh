// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA of a team, three or four CTAs that share a unit (team.cuh). CTA i has
// the i-th third or quarter of the panels of the unit's output columns, and scores every third or fourth tile: tiles
// are counted over the life of the cluster, and CTA i of k scores those with numbers k·n + i. It needs all of such a
// tile, as keys; and its own columns of every tile, as values, which come by themselves and later, so that a tile's
// place is free as soon as it has been scored.
//
//   keys    [2][64 keys]    of the tiles that this CTA scores, the columns of the first parts, in turn
//   last    [64 keys]       those of the other parts, rotary keys included
//   values  [4][64 keys]    this CTA's columns of a tile, of any tile, in turn
//   weights [k][64 rows]    probabilities of a tile, and behind them what the scoring threads have of their sums, in
//                           every CTA, for tiles of each of the k scorers
//   most    [16][64]        the greatest scores of a tile's rows, n and n + 8 of a warp side by side, in every CTA
//   notes   [2]             what there is to know of a unit
//   barriers
//
// A tile's columns come in three parts of 192. What there are two places of is fetched long before it is needed; what
// there is one of, while the tile before becomes probabilities.
//
// A cluster may have two teams, for two blocks of rows. They walk over the same tiles, and CTAs of the same rank in
// their teams, twins, fetch half of the rows of everything for both.
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/latent/latent_note.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

inline constexpr std::uint32_t kTeamParts = 3;
inline constexpr int kTeamPartPanels = kLatentDim / kPanelColumns / static_cast<int>(kTeamParts);
inline constexpr int kTeamValuePlaces = 4;
inline constexpr std::uint32_t kTeamMostPlaces = 16;
inline constexpr int kTeamNoteReaders = 2 * kWarpgroup / 32 + 2;  // warps: score, have outputs, send, fetch values

template <int kCtas_>
struct TeamMap {
  // An address also says whose memory it is: copies and arrivals would reach the first CTA's else.
  std::uint32_t base;
  std::uint32_t rank;  // in its team
  std::uint32_t team;  // which of the cluster's
  std::uint32_t teams;

  static constexpr std::uint32_t kCtas = kCtas_;
  static constexpr int kLatentPanels = kLatentDimV / kPanelColumns;
  static constexpr int kPanels = (kLatentPanels + kCtas_ - 1) / kCtas_;  // of outputs; the last CTA may have less
  static constexpr int kColumns = kPanels * kPanelColumns;
  static constexpr std::uint32_t kEarlyParts = kCtas == 3 ? 1 : 2;  // of which there are two places

  static constexpr int kPanelBytes = cuda::panel_bytes(kLatentTile);
  static constexpr int kPartBytes = kTeamPartPanels * kPanelBytes;
  static constexpr int kValueBytes = kPanels * kPanelBytes;
  static constexpr int kWeightBytes = kQueryTile * kPanelRowBytes + kWarpgroup * 8;
  static constexpr int kLastOffset = 2 * static_cast<int>(kEarlyParts) * kPartBytes;
  static constexpr int kValueOffset = kLastOffset + static_cast<int>(kTeamParts - kEarlyParts) * kPartBytes;
  static constexpr int kWeightOffset = kValueOffset + kTeamValuePlaces * kValueBytes;
  static constexpr int kMostOffset = kWeightOffset + kCtas_ * kWeightBytes;
  static constexpr int kNoteOffset = kMostOffset + static_cast<int>(kTeamMostPlaces) * kQueryTile * 4;
  static constexpr int kBarrierOffset = kNoteOffset + 2 * LatentNote::kBytes;
  static constexpr int kKeysFull = 0;
  static constexpr int kKeysEmpty = kKeysFull + static_cast<int>(kTeamParts + kEarlyParts);
  static constexpr int kValuesFull = kKeysEmpty + 2;
  static constexpr int kValuesEmpty = kValuesFull + kTeamValuePlaces;
  static constexpr int kWeightsFull = kValuesEmpty + kTeamValuePlaces;
  static constexpr int kWeightsEmpty = kWeightsFull + 2 * kCtas_;
  static constexpr int kMostFull = kWeightsEmpty + 2;
  static constexpr int kNoteFull = kMostFull + static_cast<int>(kTeamMostPlaces);
  static constexpr int kNoteEmpty = kNoteFull + 2;
  static constexpr int kQueriesAsked = kNoteEmpty + 2;
  static constexpr int kBarriers = kQueriesAsked + 1;
  static constexpr int kBytes = kBarrierOffset + kBarriers * kBarrierBytes;
  static_assert(kBytes <= kMostSharedBytes && kWeightBytes % 1024 == 0 && kPanelBytes % 1024 == 0);

  // From a tile on, the first that this CTA scores.
  __device__ std::uint32_t first_own(std::uint32_t tile) const { return tile + (rank + kCtas - tile % kCtas) % kCtas; }
  // How many panels of outputs this CTA has.
  __device__ int panels() const {
    const int left = kLatentPanels - static_cast<int>(rank) * kPanels;
    return left < kPanels ? left : kPanels;
  }

  // A part of the n-th tile that this CTA scores.
  __device__ std::uint32_t keys(std::uint32_t n, std::uint32_t part) const { return at(0, place(n, part), kPartBytes); }
  __device__ std::uint32_t values(std::uint32_t place) const { return at(kValueOffset, place, kValueBytes); }
  __device__ std::uint32_t weights(std::uint32_t place) const { return at(kWeightOffset, place, kWeightBytes); }
  // Of a thread of those that score, or of those that have outputs: of its two rows.
  __device__ std::uint32_t sums(std::uint32_t place, int thread) const {
    return weights(place) + static_cast<std::uint32_t>(kQueryTile * kPanelRowBytes + 8 * thread);
  }
  __device__ std::uint32_t most(std::uint32_t tile, int thread) const {
    const auto pair = static_cast<std::uint32_t>(thread / 4);
    return at(kMostOffset, tile % kTeamMostPlaces * (kQueryTile / 2) + pair, 8);
  }
  __device__ LatentNote note(std::uint32_t place) const { return {at(kNoteOffset, place, LatentNote::kBytes)}; }

  // A part of the n-th tile has arrived, in a phase of this parity; and its scorers, of all twins, have done with it.
  __device__ std::uint32_t keys_full(std::uint32_t n, std::uint32_t part) const {
    return barrier(kKeysFull, place(n, part));
  }
  static __device__ std::uint32_t keys_parity(std::uint32_t n, std::uint32_t part) {
    return (part < kEarlyParts ? n >> 1 : n) & 1U;
  }
  __device__ std::uint32_t keys_empty(std::uint32_t turn) const { return barrier(kKeysEmpty, turn); }
  // Columns of a tile have arrived; the outputs of all twins have them.
  __device__ std::uint32_t values_full(std::uint32_t place) const { return barrier(kValuesFull, place); }
  __device__ std::uint32_t values_empty(std::uint32_t place) const { return barrier(kValuesEmpty, place); }
  // Probabilities and sums of a tile are here. Each of these barriers is for tiles of one scorer.
  __device__ std::uint32_t weights_full(std::uint32_t tile) const { return barrier(kWeightsFull, tile % (2 * kCtas)); }
  static __device__ std::uint32_t weights_parity(std::uint32_t tile) { return tile / (2 * kCtas) & 1U; }
  static __device__ std::uint32_t weights_place(std::uint32_t tile) { return tile % kCtas; }
  // At the tile's scorer: all of the team's outputs have those of a tile. There are two in turn; one would do, as none
  // of them has the scorer's next tile before that.
  __device__ std::uint32_t weights_empty(std::uint32_t turn) const { return barrier(kWeightsEmpty, turn); }
  // The turn in which a tile's place is given back; and the one in which the n-th tile that this CTA scores waits for
  // it. The first one waits for a turn before all others, which counts as ended.
  static __device__ LatentTurn weights_left(std::uint32_t tile) { return LatentTurn::of(tile / kCtas); }
  static __device__ LatentTurn weights_awaited(std::uint32_t n) { return LatentTurn::of(n - 1); }
  // The greatest scores of a tile are here. Their place is written again for the tile 16 behind. When that one has been
  // scored, its scorer has handed over its tile before, so the outputs of all CTAs have added its tile before that one:
  // whoever scored, or added, a tile up to there has read what he needed.
  __device__ std::uint32_t most_full(std::uint32_t tile) const { return barrier(kMostFull, tile % kTeamMostPlaces); }
  static __device__ std::uint32_t most_parity(std::uint32_t tile) { return tile / kTeamMostPlaces & 1U; }
  static_assert(kTeamMostPlaces >= 3 * kCtas - 1);
  __device__ std::uint32_t note_full(std::uint32_t place) const { return barrier(kNoteFull, place); }
  __device__ std::uint32_t note_empty(std::uint32_t place) const { return barrier(kNoteEmpty, place); }
  // The scoring warps have asked for the queries of their first unit.
  __device__ std::uint32_t queries_asked() const { return barrier(kQueriesAsked, 0); }

  // Ranks in the cluster: of a CTA of this team, and of this CTA or its twin.
  __device__ std::uint32_t in_team(std::uint32_t cta) const { return kCtas * team + cta; }
  __device__ std::uint32_t twin(std::uint32_t of_team) const { return kCtas * of_team + rank; }

 private:
  static __device__ std::uint32_t place(std::uint32_t n, std::uint32_t part) {
    return part < kEarlyParts ? n % 2 * kEarlyParts + part : kEarlyParts + part;
  }
  __device__ std::uint32_t barrier(int first, std::uint32_t number) const {
    return at(kBarrierOffset + first * kBarrierBytes, number, kBarrierBytes);
  }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// By one thread.
template <int kCtas>
__device__ __forceinline__ void init_team_barriers(const TeamMap<kCtas>& map) {
  constexpr int kWarps = kWarpgroup / 32;
  const int of_twins = kWarps * static_cast<int>(map.teams);
  for (std::uint32_t n = 0; n < 2; ++n) {
    barrier_init(map.keys_empty(n), of_twins);
    barrier_init(map.weights_empty(n), kCtas * kWarps);
    barrier_init(map.note_full(n), 1);
    barrier_init(map.note_empty(n), kTeamNoteReaders);
  }
  for (std::uint32_t part = 0; part < kTeamParts; ++part) {
    barrier_init(map.keys_full(0, part), 1);
    if (part < map.kEarlyParts) barrier_init(map.keys_full(1, part), 1);
  }
  for (std::uint32_t i = 0; i < kTeamValuePlaces; ++i) {
    barrier_init(map.values_full(i), 1);
    barrier_init(map.values_empty(i), of_twins);
  }
  // The scoring warps of this CTA, or the sending one of another CTA.
  for (std::uint32_t tile = 0; tile < 2 * kCtas; ++tile) {
    barrier_init(map.weights_full(tile), tile % kCtas == map.rank ? kWarps : 1);
  }
  for (std::uint32_t i = 0; i < kTeamMostPlaces; ++i) barrier_init(map.most_full(i), kWarps);
  barrier_init(map.queries_asked(), kWarps);
  barrier_init_fence();
}

}  // namespace ringattn::sm90
