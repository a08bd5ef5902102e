// SPDX-License-Identifier: Apache-2.0
// MLA decode with a CTA group of three or four CTAs per work tile, for launches with few work tiles. As in CTA pairs
// (cta_pair.cuh), but each CTA scores every third or fourth tile and has a third or a quarter of the output columns. A
// cluster is one CTA group, or two for two row blocks of the same keys, which are then loaded once for both. One
// warpgroup computes scores, one the outputs, two warps are producers, and one sends probabilities.
#pragma once

#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla_common.cuh"

namespace ringattn::sm90 {

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

// The producer warps of a CTA in a CTA group. One loads the tiles that the CTA scores, as keys. The other loads the
// CTA's columns of all tiles, as values. Stages of values become empty thousands of cycles after those of keys, so a
// single warp would wait for one kind while the other has an empty stage. Boxes after the last key of a sequence are
// skipped, so neither these rows nor their page-table entries are read.

// Loads TMA boxes of tiles: all rows, or, with a peer CTA, half of the rows, multicast to both.
template <class Map>
class CtaGroupBoxes {
 public:
  __device__ __forceinline__ CtaGroupBoxes(const MlaParams& p, const Map& map)
      : p_(p),
        lane_(thread_of_cta() % 32),
        box_count_(p.boxes.per_tile / static_cast<int>(map.cta_groups)),
        first_row_(static_cast<int>(map.cta_group) * box_count_ * p.boxes.rows),
        peer_ctas_(map.cta_groups > 1 ? static_cast<std::uint16_t>(1U << map.peer_cta(0) | 1U << map.peer_cta(1))
                                      : std::uint16_t{0}) {}

  // This lane's box of a tile.
  __device__ __forceinline__ PageBox find(const DecodeWorkTile& work_tile, int tile) const {
    return box_of_lane(p_, work_tile, tile, first_row_, box_count_);
  }
  // Loads `panels` panels (at most kMax) from column `column` on to `target`. `rows`: rows of the tile that this CTA
  // and its peer load.
  template <int kMax>
  __device__ __forceinline__ void issue_loads(int panels, std::uint32_t target, std::uint32_t full, int rows, int head,
                                              const PageBox& of_lane, int column) const {
    if (lane_ == 0) barrier_arrive_expect(full, panels * rows * kPanelRowBytes);
    __syncwarp();
    for_boxes(of_lane, box_count_, [&](int i, const PageBox& box) {
      const std::uint32_t to = target + static_cast<std::uint32_t>((first_row_ + i * p_.boxes.rows) * kPanelRowBytes);
#pragma unroll
      for (int n = 0; n < kMax; ++n) {
        if (n >= panels) break;
        const std::uint32_t panel = to + static_cast<std::uint32_t>(n * Map::kPanelBytes);
        const int from = column + n * kPanelColumns;
        if (peer_ctas_ != 0) {
          tma_multicast_page_box_once(peer_ctas_, panel, &p_.k, full, from, head, box.page, box.row);
        } else {
          tma_load_page_box_once(panel, &p_.k, full, from, head, box.page, box.row);
        }
      }
    });
  }

 private:
  const MlaParams& p_;
  const int lane_;
  const int box_count_;            // this CTA's boxes per tile
  const int first_row_;            // this CTA's first row of a tile
  const std::uint16_t peer_ctas_;  // multicast mask; 0: no peer
};

// Producer of keys. Finds the work tiles, passes them to the other warps, and loads each column part of the tiles that
// this CTA scores as soon as its stage is empty.
template <class C>
class CtaGroupKeyProducer {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ CtaGroupKeyProducer(const MlaParams& p, const Map& map)
      : p_(p), map_(map), boxes_(p, map), infos_(map) {}

  // Processes work tiles first, first + step, …
  __device__ __forceinline__ void run(int first, int step) {
    WorkTileFinder<C> work_tile_finder(p_);
    const int work_tiles = work_tile_finder.count();
#pragma unroll 1
    for (int n = first; n < work_tiles; n += step) process(work_tile_finder.find(n));
    infos_.send_end();
  }

 private:
  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    const auto tile_at = [&](std::uint32_t number) { return work_tile.begin + static_cast<int>(number - first); };
    std::uint32_t own = map_.first_own(first);
    PageBox next = boxes_.find(work_tile, tile_at(own));
    const bool first_work_tile = infos_.none();
    infos_.await();
    infos_.send(work_tile);
    if (first_work_tile) barrier_wait(map_.queries_issued(), 0);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += Map::kCtas) {
      const PageBox box = next;
      next = boxes_.find(work_tile, tile_at(own + Map::kCtas));
      const int rows = box_rows_of(p_, work_tile.seq_info.length - tile_at(own) * kMlaKeyTile);
#pragma unroll 1
      for (std::uint32_t part = 0; part < kCtaGroupTileParts; ++part) {
        load(work_tile.kv_head, warp_uniform(own / Map::kCtas), warp_uniform(part), box, rows);
      }
    }
  }

  // Loads a column part of the n-th tile that this CTA scores.
  __device__ __forceinline__ void load(int head, std::uint32_t n, std::uint32_t part, const PageBox& box,
                                       int rows) const {
    // The stage is empty when the tile before it in the same stage has been scored.
    const MlaPipelineState scored = MlaPipelineState::of(part < Map::kDoubleBufferedParts ? n - 2 : n - 1);
    barrier_wait(map_.keys_empty(scored.index), scored.parity);
    boxes_.template issue_loads<kCtaGroupPartPanels>(kCtaGroupPartPanels, map_.keys(n, part), map_.keys_full(n, part),
                                                     rows, head, box,
                                                     static_cast<int>(part) * kCtaGroupPartPanels * kPanelColumns);
  }

  const MlaParams& p_;
  const Map& map_;
  const CtaGroupBoxes<Map> boxes_;
  WorkTileInfoWriter<Map> infos_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

// Producer of values: loads this CTA's columns of all tiles.
template <class C>
class CtaGroupValueProducer {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ CtaGroupValueProducer(const MlaParams& p, const Map& map)
      : p_(p), map_(map), boxes_(p, map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    PageBox next = boxes_.find(work_tile, work_tile.begin);
    if (!started_) barrier_wait(map_.queries_issued(), 0);
    started_ = true;
#pragma unroll 1
    for (int tile = work_tile.begin; tile < work_tile.end; ++tile) {
      const PageBox box = next;
      next = boxes_.find(work_tile, tile + 1);
      load(work_tile.kv_head, box, box_rows_of(p_, work_tile.seq_info.length - tile * kMlaKeyTile));
    }
  }

 private:
  __device__ __forceinline__ void load(int head, const PageBox& box, int rows) {
    const std::uint32_t stage = warp_uniform(stage_.stage());
    barrier_wait(map_.values_empty(stage), stage_.parity() ^ 1U);
    boxes_.template issue_loads<Map::kPanels>(map_.panels(), map_.values(stage), map_.values_full(stage), rows, head,
                                              box, static_cast<int>(map_.rank) * Map::kColumns);
    stage_.advance();
  }

  const MlaParams& p_;
  const Map& map_;
  const CtaGroupBoxes<Map> boxes_;
  bool started_ = false;
  PackedPipelineState<kCtaGroupValueStages> stage_;
};

// The scoring warpgroup of a CTA in a CTA group, which scores every third or fourth tile with the queries in registers,
// and the warp that sends the probabilities to the other CTAs.
//
// The softmax offset of a row depends on the previous tile's offset and on the row's maximum score in the tile. Scorers
// send the row maxima of their tiles to all CTAs as soon as they have them, and each CTA computes the offsets itself
// (mla_common.cuh). So no tile waits for a message that depends on another message. Row sums are sent with the
// probabilities, and the output warpgroups add them up.

template <class C>
class CtaGroupScorer {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ CtaGroupScorer(const MlaParams& params, const Map& map)
      : params_(params), p_(params.attention), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    // The CTA's first keys and values are loaded after its queries: with the loads of all CTAs in flight, they arrive
    // late.
    const auto arrive_producers = [&] {
      if (!started_ && thread_of_cta() % 32 == 0) barrier_arrive(map_.queries_issued());
      started_ = true;
    };
    std::uint32_t tile = map_.first_own(first);
    if (static_cast<int>(tiles_ - tile) <= 0) {
      arrive_producers();
      return;
    }
    const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
    queries_.load(params_, work_tile, arrive_producers);
    offset_tile_ = first;
    softmax_offset_[0] = softmax_offset_[1] = -INFINITY;
    const auto mask = [&](MlaScores& s) {
      const int number = work_tile.begin + static_cast<int>(tile - first);
      scale_and_mask<C>(p_, s, thread_rows, number, number < plain.begin || number >= plain.end);
    };
    const auto is_of_work_tile = [&](std::uint32_t number) { return static_cast<int>(tiles_ - number) > 0; };
    MlaScores s;
    if constexpr (kOverlapsNextGemm) {
      begin_gemm(s, tile);
      end_gemm(s, tile);
      mask(s);
#pragma unroll 1
      while (is_of_work_tile(tile + Map::kCtas)) {
        MlaScores next;
        softmax_step(s, tile, [&] { begin_gemm(next, tile + Map::kCtas); });
        tile += Map::kCtas;
        end_gemm(next, tile);
#pragma unroll
        for (int j = 0; j < kMlaKeyTile / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[j][i] = next[j][i];
        }
        mask(s);
      }
      softmax_step(s, tile, [] {});
    } else {
#pragma unroll 1
      for (; is_of_work_tile(tile); tile += Map::kCtas) {
        begin_gemm(s, tile);
        end_gemm(s, tile);
        mask(s);
        softmax_step(s, tile, [] {});
      }
    }
  }

 private:
  static constexpr int kPartSteps = kCtaGroupPartPanels * kPanelColumns / 16;
  // True if the next tile's first MMAs are issued while the row maxima are in flight. CTA groups of four were slower
  // with it (bench/notes/mla.md).
  static constexpr bool kOverlapsNextGemm = Map::kCtas == 3;

  // Issues S = Q Kᵀ for the tile's first column part.
  __device__ __forceinline__ void begin_gemm(MlaScores& s, std::uint32_t tile) const {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 0);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kPartSteps>(s, map_.keys(n, 0));
  }
  // Issues the other column parts, waits, and releases the tile's keys.
  __device__ __forceinline__ void end_gemm(MlaScores& s, std::uint32_t tile) {
    const std::uint32_t n = tile / Map::kCtas;
    await(n, 1);
    wgmma_fence();
    queries_.template multiply<kPartSteps, 2 * kPartSteps>(s, map_.keys(n, 1));
    await(n, 2);
    wgmma_fence();
    queries_.template multiply<2 * kPartSteps, 3 * kPartSteps>(s, map_.keys(n, 2));
    wgmma_commit();
    // Uses the row maxima that have arrived, during the MMAs.
#pragma unroll 1
    while (offset_tile_ != tile && __all_sync(0xffffffffU, row_max_arrived(offset_tile_)) != 0) update_offsets();
    wgmma_wait<0>();
    pin(s);
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < map_.cta_groups) barrier_arrive_at(map_to_cta(map_.keys_empty(n % 2), map_.peer_cta(lane)));
    __syncwarp();
  }

  // Computes probabilities from scores and stores them for the sender. meanwhile() is called after the row maxima are
  // sent, before those of other CTAs are waited for.
  template <class Meanwhile>
  __device__ __forceinline__ void softmax_step(MlaScores& s, std::uint32_t tile, Meanwhile meanwhile) {
    float row_max[2], shift[2], sum[2];
    max_scores(p_, s, row_max);
    send(row_max, tile);
    meanwhile();
#pragma unroll 1
    while (offset_tile_ != tile) {
      barrier_wait(map_.row_max_full(offset_tile_), Map::row_max_parity(offset_tile_));
      update_offsets();
    }
    ++offset_tile_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax_offset_[half] = offset_after(softmax_offset_[half], row_max[half]);
      shift[half] = softmax_offset_[half] == -INFINITY ? 0.0F : -softmax_offset_[half];
    }
    exponentiate<C>(p_, shift, s, sum);
    MlaProbabilities probability;
    pack<C>(s, probability);
#pragma unroll
    for (auto& step : probability) {
#pragma unroll
      for (std::uint32_t& word : step) keep(word);  // computed before the wait, not after it
    }
    const std::uint32_t stage = Map::probabilities_stage(tile);
    const MlaPipelineState before = map_.probabilities_acquired(tile / Map::kCtas);
    barrier_wait(map_.probabilities_empty(before.index), before.parity);
    store_probabilities(map_.probabilities(stage), probability);
    store_pair(map_.sums(stage, thread_of_warpgroup()), sum[0], sum[1]);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.probabilities_full(tile));
    __syncwarp();
  }

  __device__ __forceinline__ void await(std::uint32_t n, std::uint32_t part) const {
    barrier_wait(map_.keys_full(n, part), Map::keys_parity(n, part));
  }

  // Sends the row maxima of a tile to all CTAs of the group. Each of the four threads of a row sends to one CTA.
  __device__ __forceinline__ void send(const float (&row_max)[2], std::uint32_t tile) const {
    const int thread = thread_of_warpgroup();
    const auto to = static_cast<std::uint32_t>(thread % 4);
    const std::uint32_t address = map_.row_max(tile, thread);
    const std::uint32_t here = map_.row_max_full(tile), there = map_to_cta(here, map_.in_cta_group(to));
    const bool own = to == map_.rank;
    if (own) {
      store_pair(address, row_max[0], row_max[1]);
    } else if (to < Map::kCtas) {
      dsmem_store_pair_async(map_to_cta(address, map_.in_cta_group(to)), there, row_max[0], row_max[1]);
    }
    __syncwarp();
    if (thread % 32 < static_cast<int>(Map::kCtas)) {
      if (own) {
        barrier_arrive(here);
      } else {
        barrier_arrive_expect_at(there, 32 / 4 * 8);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool row_max_arrived(std::uint32_t tile) const {
    return barrier_ended(map_.row_max_full(tile), Map::row_max_parity(tile));
  }
  // Updates the softmax offsets with the row maxima of tile offset_tile_.
  __device__ __forceinline__ void update_offsets() {
    const float2 row_max = load_pair(map_.row_max(offset_tile_, thread_of_warpgroup()));
    softmax_offset_[0] = offset_after(softmax_offset_[0], row_max.x);
    softmax_offset_[1] = offset_after(softmax_offset_[1], row_max.y);
    ++offset_tile_;
  }

  const MlaParams& params_;
  const cuda::AttentionParams& p_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
  bool started_ = false;
  std::uint32_t offset_tile_ = 0;  // softmax_offset_ includes all tiles before this one
  float softmax_offset_[2];        // of this thread's rows
  QueryRows<C> queries_;
};

// Sends probabilities and row sums of the tiles that this CTA scores to the other CTAs of the group. By one warp.
template <class Map>
class CtaGroupSender {
 public:
  __device__ __forceinline__ explicit CtaGroupSender(const Map& map) : map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
#pragma unroll 1
    for (std::uint32_t tile = map_.first_own(first); static_cast<int>(tiles_ - tile) > 0; tile += Map::kCtas) {
      const std::uint32_t from = warp_uniform(map_.probabilities(Map::probabilities_stage(tile)));
      const std::uint32_t full = warp_uniform(map_.probabilities_full(tile));
      barrier_wait(full, Map::probabilities_parity(tile));
      if (elect_one()) {
#pragma unroll
        for (std::uint32_t i = 1; i < Map::kCtas; ++i) {
          const std::uint32_t to = map_.in_cta_group((map_.rank + i) % Map::kCtas);
          dsmem_copy(map_to_cta(from, to), from, Map::kProbabilityBytes, map_to_cta(full, to));
        }
      }
      __syncwarp();
    }
  }

 private:
  const Map& map_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

// The output warpgroup of a CTA in a CTA group: some columns of a work tile's outputs. It adds P V of every tile in
// order, whichever CTA has scored it, and computes softmax offsets and sums itself.

template <class C>
class CtaGroupOutputs {
  using Map = typename C::Map;
  using Columns = OutputColumns<C, Map::kColumns>;

 public:
  __device__ __forceinline__ CtaGroupOutputs(const MlaParams& params, const Map& map) : params_(params), map_(map) {}

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

  const MlaParams& params_;
  const Map& map_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
  PackedPipelineState<kCtaGroupValueStages> stage_;
  typename Columns::Rescale rescale_{};  // factors before the next tile is added
  float l_[2];                           // this thread's addend of its rows' sums
  Columns columns_;
};

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) cta_group_kernel(const __grid_constant__ MlaParams params) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = 80;
  const std::uint32_t rank = rank_in_cluster();
  using Map = typename C::Map;
  const Map map{map_to_cta(kReservedBytes, rank), rank % Map::kCtas, rank / Map::kCtas, cluster_size() / Map::kCtas};
  if (threadIdx.x == 0) init_cta_group_barriers(map);
  cuda::pdl_launch_dependents();
  __syncthreads();
  cluster_sync();
  cuda::pdl_wait();
  if (threadIdx.x < kWarpgroup) {
    reg_alloc<kScoreRegisters>();
    CtaGroupScorer<C> scorer(params, map);
    for_each_work_tile(map, scorer);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    reg_alloc<kMlaRegisters - kScoreRegisters - kOtherRegisters>();
    CtaGroupOutputs<C> outputs(params, map);
    for_each_work_tile(map, outputs);
  } else {
    reg_dealloc<kOtherRegisters>();
    const auto warp = static_cast<int>(threadIdx.x / 32) - 2 * kWarpgroup / 32;
    if (warp == 0) {
      // The work tiles of two row blocks have consecutive numbers, so both CTA groups of a cluster use the same keys.
      constexpr int kCtas = Map::kCtas;
      CtaGroupKeyProducer<C>(params, map)
          .run(static_cast<int>(blockIdx.x) / kCtas, static_cast<int>(gridDim.x) / kCtas);
    } else if (warp == 1) {
      CtaGroupSender<Map> sender(map);
      for_each_work_tile(map, sender);
    } else if (warp == 2) {
      CtaGroupValueProducer<C> values(params, map);
      for_each_work_tile(map, values);
    }
  }
  // DSMEM of a CTA must not be accessed after it exits. All stores that other CTAs sent here have been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
