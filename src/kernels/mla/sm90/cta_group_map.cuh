// SPDX-License-Identifier: Apache-2.0
// Shared-memory layout and barriers of a CTA of cta_group_kernel (cta_group.cuh). CTA i of k holds the output panels
// from i · kPanels on, and scores tiles k · n + i, where tiles are counted over all work tiles of the cluster. It needs
// all columns of these tiles as keys, and its own columns of every tile as values. Values are loaded again, and later,
// so that a stage of keys is free as soon as the tile has been scored.
//
//   keys           [2][64 keys][192]     first column parts of the tiles that this CTA scores, double-buffered
//   last keys      [64 keys][192]        the other column parts, rotary keys included, single-buffered
//   values         [4][64 keys][columns] this CTA's columns of every tile
//   probabilities  [k][64 rows][64 keys] per scorer: probabilities of a tile, and each scoring thread's addends of row
//                                       sums
//   row_max        [16][64]              maximum scores of the rows of a tile, rows n and n + 8 of a warp adjacent
//   info           [2]                   MlaWorkTileInfo
//   barriers
//
// Probabilities and row maxima of every tile are sent to all CTAs of the group. A tile has three column parts of 192:
// the first one (k = 3) or two (k = 4) are double-buffered, and are loaded long before they are needed. The others are
// loaded during the softmax of the previous tile.
//
// A cluster may have two CTA groups, for two row blocks. Both process the same tiles. CTAs of the same rank in their
// groups are peers: each multicasts half of the rows of every tile to both.
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla_work_tile_info.cuh"

namespace ringattn::sm90 {

inline constexpr std::uint32_t kCtaGroupTileParts = 3;
inline constexpr int kCtaGroupPartPanels = kLatentDim / kPanelColumns / static_cast<int>(kCtaGroupTileParts);
inline constexpr int kCtaGroupValueStages = 4;
inline constexpr std::uint32_t kCtaGroupMaxStages = 16;
// Warps: scores, outputs, sender, producer of values.
inline constexpr int kCtaGroupInfoReaders = 2 * kWarpgroup / 32 + 2;

template <int kCtas_>
struct CtaGroupMap {
  // Shared-memory address of this CTA in the shared::cluster window. TMA writes and arrivals on a plain address would
  // go to rank 0.
  std::uint32_t base;
  std::uint32_t rank;        // in its CTA group
  std::uint32_t cta_group;   // index in the cluster
  std::uint32_t cta_groups;  // per cluster

  static constexpr std::uint32_t kCtas = kCtas_;
  static constexpr int kLatentPanels = kLatentDimV / kPanelColumns;
  // Output panels per CTA. The last CTA may have fewer.
  static constexpr int kPanels = (kLatentPanels + kCtas_ - 1) / kCtas_;
  static constexpr int kColumns = kPanels * kPanelColumns;
  static constexpr std::uint32_t kDoubleBufferedParts = kCtas == 3 ? 1 : 2;  // column parts with two stages

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kPartBytes = kCtaGroupPartPanels * kPanelBytes;
  static constexpr int kValueBytes = kPanels * kPanelBytes;
  static constexpr int kProbabilityBytes = kQueryTile * kPanelRowBytes + kWarpgroup * 8;
  static constexpr int kSingleBufferedOffset = 2 * static_cast<int>(kDoubleBufferedParts) * kPartBytes;
  static constexpr int kValueOffset =
      kSingleBufferedOffset + static_cast<int>(kCtaGroupTileParts - kDoubleBufferedParts) * kPartBytes;
  static constexpr int kProbabilityOffset = kValueOffset + kCtaGroupValueStages * kValueBytes;
  static constexpr int kRowMaxOffset = kProbabilityOffset + kCtas_ * kProbabilityBytes;
  static constexpr int kInfoOffset = kRowMaxOffset + static_cast<int>(kCtaGroupMaxStages) * kQueryTile * 4;
  static constexpr int kBarrierOffset = kInfoOffset + 2 * MlaWorkTileInfo::kBytes;
  static constexpr int kKeysFull = 0;
  static constexpr int kKeysEmpty = kKeysFull + static_cast<int>(kCtaGroupTileParts + kDoubleBufferedParts);
  static constexpr int kValuesFull = kKeysEmpty + 2;
  static constexpr int kValuesEmpty = kValuesFull + kCtaGroupValueStages;
  static constexpr int kProbabilitiesFull = kValuesEmpty + kCtaGroupValueStages;
  static constexpr int kProbabilitiesEmpty = kProbabilitiesFull + 2 * kCtas_;
  static constexpr int kRowMaxFull = kProbabilitiesEmpty + 2;
  static constexpr int kInfoFull = kRowMaxFull + static_cast<int>(kCtaGroupMaxStages);
  static constexpr int kInfoEmpty = kInfoFull + 2;
  static constexpr int kQueriesIssued = kInfoEmpty + 2;
  static constexpr int kBarriers = kQueriesIssued + 1;
  static constexpr int kBytes = kBarrierOffset + kBarriers * kBarrierBytes;
  static_assert(kBytes <= kMaxSharedBytes && kProbabilityBytes % 1024 == 0 && kPanelBytes % 1024 == 0);

  // The first tile from `tile` on that this CTA scores.
  __device__ std::uint32_t first_own(std::uint32_t tile) const { return tile + (rank + kCtas - tile % kCtas) % kCtas; }
  // Number of output panels of this CTA.
  __device__ int panels() const {
    const int left = kLatentPanels - static_cast<int>(rank) * kPanels;
    return left < kPanels ? left : kPanels;
  }

  // A column part of the n-th tile that this CTA scores.
  __device__ std::uint32_t keys(std::uint32_t n, std::uint32_t part) const { return at(0, stage(n, part), kPartBytes); }
  __device__ std::uint32_t values(std::uint32_t stage) const { return at(kValueOffset, stage, kValueBytes); }
  __device__ std::uint32_t probabilities(std::uint32_t stage) const {
    return at(kProbabilityOffset, stage, kProbabilityBytes);
  }
  // The addends of a thread's two rows. `thread`: of the scoring warpgroup, or the same thread of the output warpgroup.
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

  // keys_full: a column part of the n-th tile has landed. keys_empty: the scorers of all peers have read the tile.
  __device__ std::uint32_t keys_full(std::uint32_t n, std::uint32_t part) const {
    return barrier(kKeysFull, stage(n, part));
  }
  static __device__ std::uint32_t keys_parity(std::uint32_t n, std::uint32_t part) {
    return (part < kDoubleBufferedParts ? n >> 1 : n) & 1U;
  }
  __device__ std::uint32_t keys_empty(std::uint32_t stage) const { return barrier(kKeysEmpty, stage); }
  // values_full: this CTA's columns of a tile have landed. values_empty: the output warpgroups of all peers have read
  // them.
  __device__ std::uint32_t values_full(std::uint32_t stage) const { return barrier(kValuesFull, stage); }
  __device__ std::uint32_t values_empty(std::uint32_t stage) const { return barrier(kValuesEmpty, stage); }
  // Probabilities and sums of a tile have arrived. Each scorer has barriers of its own.
  __device__ std::uint32_t probabilities_full(std::uint32_t tile) const {
    return barrier(kProbabilitiesFull, tile % (2 * kCtas));
  }
  static __device__ std::uint32_t probabilities_parity(std::uint32_t tile) { return tile / (2 * kCtas) & 1U; }
  static __device__ std::uint32_t probabilities_stage(std::uint32_t tile) { return tile % kCtas; }
  // At the tile's scorer: the output warpgroups of all CTAs in the group have read the probabilities. There are two
  // barriers, used alternately. One would do, as no output warpgroup has the scorer's next tile before that.
  __device__ std::uint32_t probabilities_empty(std::uint32_t stage) const {
    return barrier(kProbabilitiesEmpty, stage);
  }
  // The state in which a tile's probabilities are released, and the one that the n-th tile of this CTA waits for to
  // acquire the stage. The first tile waits for the phase before the first, which counts as complete.
  static __device__ MlaPipelineState probabilities_released(std::uint32_t tile) {
    return MlaPipelineState::of(tile / kCtas);
  }
  static __device__ MlaPipelineState probabilities_acquired(std::uint32_t n) { return MlaPipelineState::of(n - 1); }
  // The row maxima of a tile have arrived. Their stage is reused for the tile 16 later. When that one has been scored,
  // its scorer has sent its previous tile, so the output warpgroups of all CTAs have added that scorer's tile before
  // it. All CTAs that scored or added a tile up to there have read the row maxima that they need.
  __device__ std::uint32_t row_max_full(std::uint32_t tile) const {
    return barrier(kRowMaxFull, tile % kCtaGroupMaxStages);
  }
  static __device__ std::uint32_t row_max_parity(std::uint32_t tile) { return tile / kCtaGroupMaxStages & 1U; }
  static_assert(kCtaGroupMaxStages >= 3 * kCtas - 1);
  __device__ std::uint32_t info_full(std::uint32_t stage) const { return barrier(kInfoFull, stage); }
  __device__ std::uint32_t info_empty(std::uint32_t stage) const { return barrier(kInfoEmpty, stage); }
  // The scoring warps have issued the loads of their first work tile's queries.
  __device__ std::uint32_t queries_issued() const { return barrier(kQueriesIssued, 0); }

  // Ranks in the cluster: of CTA `cta` of this group, and of this CTA's peer in group `of_cta_group`.
  __device__ std::uint32_t in_cta_group(std::uint32_t cta) const { return kCtas * cta_group + cta; }
  __device__ std::uint32_t peer_cta(std::uint32_t of_cta_group) const { return kCtas * of_cta_group + rank; }

 private:
  static __device__ std::uint32_t stage(std::uint32_t n, std::uint32_t part) {
    return part < kDoubleBufferedParts ? n % 2 * kDoubleBufferedParts + part : kDoubleBufferedParts + part;
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
  const int peer_warps = kWarps * static_cast<int>(map.cta_groups);
  for (std::uint32_t n = 0; n < 2; ++n) {
    barrier_init(map.keys_empty(n), peer_warps);
    barrier_init(map.probabilities_empty(n), kCtas * kWarps);
    barrier_init(map.info_full(n), 1);
    barrier_init(map.info_empty(n), kCtaGroupInfoReaders);
  }
  for (std::uint32_t part = 0; part < kCtaGroupTileParts; ++part) {
    barrier_init(map.keys_full(0, part), 1);
    if (part < map.kDoubleBufferedParts) barrier_init(map.keys_full(1, part), 1);
  }
  for (std::uint32_t i = 0; i < kCtaGroupValueStages; ++i) {
    barrier_init(map.values_full(i), 1);
    barrier_init(map.values_empty(i), peer_warps);
  }
  // The scoring warps of this CTA arrive, or the sending warp of another CTA.
  for (std::uint32_t tile = 0; tile < 2 * kCtas; ++tile) {
    barrier_init(map.probabilities_full(tile), tile % kCtas == map.rank ? kWarps : 1);
  }
  for (std::uint32_t i = 0; i < kCtaGroupMaxStages; ++i) barrier_init(map.row_max_full(i), kWarps);
  barrier_init(map.queries_issued(), kWarps);
  barrier_init_fence();
}

}  // namespace ringattn::sm90
