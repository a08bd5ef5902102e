// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA of a cta_group, three or four CTAs that share a work_tile
// (cta_group.cuh). CTA i has the i-th third or quarter of the panels of the work_tile's output columns, and scores
// every third or fourth tile: tiles are counted over the life of the cluster, and CTA i of k scores those with numbers
// k·n + i. It needs all of such a tile, as keys; and its own columns of every tile, as values, which come by themselves
// and later, so that a tile's stage is free as soon as it has been scored.
//
//   keys    [2][64 keys]    of the tiles that this CTA scores, the columns of the first parts, in turn
//   last    [64 keys]       those of the other parts, rotary keys included
//   values  [4][64 keys]    this CTA's columns of a tile, of any tile, in turn
//   probabilities [k][64 rows]    probabilities of a tile, and behind them what the scoring threads have of their sums,
//   in
//                           every CTA, for tiles of each of the k scorers
//   row_max    [16][64]        the greatest scores of a tile's rows, n and n + 8 of a warp side by side, in every CTA
//   notes   [2]             what there is to know of a work_tile
//   barriers
//
// A tile's columns come in three parts of 192. What there are two places of is fetched long before it is needed; what
// there is one of, while the tile before becomes probabilities.
//
// A cluster may have two cta_groups, for two blocks of rows. They walk over the same tiles, and CTAs of the same rank
// in their cta_groups, peer_ctas, fetch half of the rows of everything for both.
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/latent/mla_work_tile_info.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

inline constexpr std::uint32_t kCtaGroupTileParts = 3;
inline constexpr int kCtaGroupPartPanels = kLatentDim / kPanelColumns / static_cast<int>(kCtaGroupTileParts);
inline constexpr int kCtaGroupValueStages = 4;
inline constexpr std::uint32_t kCtaGroupMaxStages = 16;
inline constexpr int kCtaGroupInfoReaders = 2 * kWarpgroup / 32 + 2;  // warps: score, have outputs, send, fetch values

template <int kCtas_>
struct CtaGroupMap {
  // An address also says whose memory it is: copies and arrivals would reach the first CTA's else.
  std::uint32_t base;
  std::uint32_t rank;       // in its cta_group
  std::uint32_t cta_group;  // which of the cluster's
  std::uint32_t cta_groups;

  static constexpr std::uint32_t kCtas = kCtas_;
  static constexpr int kLatentPanels = kLatentDimV / kPanelColumns;
  static constexpr int kPanels = (kLatentPanels + kCtas_ - 1) / kCtas_;  // of outputs; the last CTA may have less
  static constexpr int kColumns = kPanels * kPanelColumns;
  static constexpr std::uint32_t kEarlyParts = kCtas == 3 ? 1 : 2;  // of which there are two places

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kPartBytes = kCtaGroupPartPanels * kPanelBytes;
  static constexpr int kValueBytes = kPanels * kPanelBytes;
  static constexpr int kProbabilityBytes = kQueryTile * kPanelRowBytes + kWarpgroup * 8;
  static constexpr int kLastOffset = 2 * static_cast<int>(kEarlyParts) * kPartBytes;
  static constexpr int kValueOffset = kLastOffset + static_cast<int>(kCtaGroupTileParts - kEarlyParts) * kPartBytes;
  static constexpr int kProbabilityOffset = kValueOffset + kCtaGroupValueStages * kValueBytes;
  static constexpr int kRowMaxOffset = kProbabilityOffset + kCtas_ * kProbabilityBytes;
  static constexpr int kInfoOffset = kRowMaxOffset + static_cast<int>(kCtaGroupMaxStages) * kQueryTile * 4;
  static constexpr int kBarrierOffset = kInfoOffset + 2 * MlaWorkTileInfo::kBytes;
  static constexpr int kKeysFull = 0;
  static constexpr int kKeysEmpty = kKeysFull + static_cast<int>(kCtaGroupTileParts + kEarlyParts);
  static constexpr int kValuesFull = kKeysEmpty + 2;
  static constexpr int kValuesEmpty = kValuesFull + kCtaGroupValueStages;
  static constexpr int kProbabilitiesFull = kValuesEmpty + kCtaGroupValueStages;
  static constexpr int kProbabilitiesEmpty = kProbabilitiesFull + 2 * kCtas_;
  static constexpr int kRowMaxFull = kProbabilitiesEmpty + 2;
  static constexpr int kInfoFull = kRowMaxFull + static_cast<int>(kCtaGroupMaxStages);
  static constexpr int kInfoEmpty = kInfoFull + 2;
  static constexpr int kQueriesAsked = kInfoEmpty + 2;
  static constexpr int kBarriers = kQueriesAsked + 1;
  static constexpr int kBytes = kBarrierOffset + kBarriers * kBarrierBytes;
  static_assert(kBytes <= kMaxSharedBytes && kProbabilityBytes % 1024 == 0 && kPanelBytes % 1024 == 0);

  // From a tile on, the first that this CTA scores.
  __device__ std::uint32_t first_own(std::uint32_t tile) const { return tile + (rank + kCtas - tile % kCtas) % kCtas; }
  // How many panels of outputs this CTA has.
  __device__ int panels() const {
    const int left = kLatentPanels - static_cast<int>(rank) * kPanels;
    return left < kPanels ? left : kPanels;
  }

  // A part of the n-th tile that this CTA scores.
  __device__ std::uint32_t keys(std::uint32_t n, std::uint32_t part) const { return at(0, stage(n, part), kPartBytes); }
  __device__ std::uint32_t values(std::uint32_t stage) const { return at(kValueOffset, stage, kValueBytes); }
  __device__ std::uint32_t probabilities(std::uint32_t stage) const {
    return at(kProbabilityOffset, stage, kProbabilityBytes);
  }
  // Of a thread of those that score, or of those that have outputs: of its two rows.
  __device__ std::uint32_t sums(std::uint32_t stage, int thread) const {
    return probabilities(stage) + static_cast<std::uint32_t>(kQueryTile * kPanelRowBytes + 8 * thread);
  }
  __device__ std::uint32_t row_max(std::uint32_t tile, int thread) const {
    const auto pair = static_cast<std::uint32_t>(thread / 4);
    return at(kRowMaxOffset, tile % kCtaGroupMaxStages * (kQueryTile / 2) + pair, 8);
  }
  __device__ MlaWorkTileInfo info(std::uint32_t stage) const {
    return {at(kInfoOffset, stage, MlaWorkTileInfo::kBytes)};
  }

  // A part of the n-th tile has arrived, in a phase of this parity; and its scorers, of all peer_ctas, have done with
  // it.
  __device__ std::uint32_t keys_full(std::uint32_t n, std::uint32_t part) const {
    return barrier(kKeysFull, stage(n, part));
  }
  static __device__ std::uint32_t keys_parity(std::uint32_t n, std::uint32_t part) {
    return (part < kEarlyParts ? n >> 1 : n) & 1U;
  }
  __device__ std::uint32_t keys_empty(std::uint32_t turn) const { return barrier(kKeysEmpty, turn); }
  // Columns of a tile have arrived; the outputs of all peer_ctas have them.
  __device__ std::uint32_t values_full(std::uint32_t stage) const { return barrier(kValuesFull, stage); }
  __device__ std::uint32_t values_empty(std::uint32_t stage) const { return barrier(kValuesEmpty, stage); }
  // Probabilities and sums of a tile are here. Each of these barriers is for tiles of one scorer.
  __device__ std::uint32_t probabilities_full(std::uint32_t tile) const {
    return barrier(kProbabilitiesFull, tile % (2 * kCtas));
  }
  static __device__ std::uint32_t probabilities_parity(std::uint32_t tile) { return tile / (2 * kCtas) & 1U; }
  static __device__ std::uint32_t probabilities_stage(std::uint32_t tile) { return tile % kCtas; }
  // At the tile's scorer: all of the cta_group's outputs have those of a tile. There are two in turn; one would do, as
  // none of them has the scorer's next tile before that.
  __device__ std::uint32_t probabilities_empty(std::uint32_t turn) const { return barrier(kProbabilitiesEmpty, turn); }
  // The turn in which a tile's stage is given back; and the one in which the n-th tile that this CTA scores waits for
  // it. The first one waits for a turn before all others, which counts as ended.
  static __device__ MlaPipelineState probabilities_released(std::uint32_t tile) {
    return MlaPipelineState::of(tile / kCtas);
  }
  static __device__ MlaPipelineState probabilities_acquired(std::uint32_t n) { return MlaPipelineState::of(n - 1); }
  // The greatest scores of a tile are here. Their stage is written again for the tile 16 behind. When that one has been
  // scored, its scorer has handed over its tile before, so the outputs of all CTAs have added its tile before that one:
  // whoever scored, or added, a tile up to there has read what he needed.
  __device__ std::uint32_t row_max_full(std::uint32_t tile) const {
    return barrier(kRowMaxFull, tile % kCtaGroupMaxStages);
  }
  static __device__ std::uint32_t row_max_parity(std::uint32_t tile) { return tile / kCtaGroupMaxStages & 1U; }
  static_assert(kCtaGroupMaxStages >= 3 * kCtas - 1);
  __device__ std::uint32_t info_full(std::uint32_t stage) const { return barrier(kInfoFull, stage); }
  __device__ std::uint32_t info_empty(std::uint32_t stage) const { return barrier(kInfoEmpty, stage); }
  // The scoring warps have asked for the queries of their first work_tile.
  __device__ std::uint32_t queries_asked() const { return barrier(kQueriesAsked, 0); }

  // Ranks in the cluster: of a CTA of this cta_group, and of this CTA or its peer_cta.
  __device__ std::uint32_t in_cta_group(std::uint32_t cta) const { return kCtas * cta_group + cta; }
  __device__ std::uint32_t peer_cta(std::uint32_t of_cta_group) const { return kCtas * of_cta_group + rank; }

 private:
  static __device__ std::uint32_t stage(std::uint32_t n, std::uint32_t part) {
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
__device__ __forceinline__ void init_cta_group_barriers(const CtaGroupMap<kCtas>& map) {
  constexpr int kWarps = kWarpgroup / 32;
  const int of_peers = kWarps * static_cast<int>(map.cta_groups);
  for (std::uint32_t n = 0; n < 2; ++n) {
    barrier_init(map.keys_empty(n), of_peers);
    barrier_init(map.probabilities_empty(n), kCtas * kWarps);
    barrier_init(map.info_full(n), 1);
    barrier_init(map.info_empty(n), kCtaGroupInfoReaders);
  }
  for (std::uint32_t part = 0; part < kCtaGroupTileParts; ++part) {
    barrier_init(map.keys_full(0, part), 1);
    if (part < map.kEarlyParts) barrier_init(map.keys_full(1, part), 1);
  }
  for (std::uint32_t i = 0; i < kCtaGroupValueStages; ++i) {
    barrier_init(map.values_full(i), 1);
    barrier_init(map.values_empty(i), of_peers);
  }
  // The scoring warps of this CTA, or the sending one of another CTA.
  for (std::uint32_t tile = 0; tile < 2 * kCtas; ++tile) {
    barrier_init(map.probabilities_full(tile), tile % kCtas == map.rank ? kWarps : 1);
  }
  for (std::uint32_t i = 0; i < kCtaGroupMaxStages; ++i) barrier_init(map.row_max_full(i), kWarps);
  barrier_init(map.queries_asked(), kWarps);
  barrier_init_fence();
}

}  // namespace ringattn::sm90
