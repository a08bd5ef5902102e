// SPDX-License-Identifier: Apache-2.0
// The producer warps of a CTA in a CTA group. One loads the tiles that the CTA scores, as keys. The other loads the
// CTA's columns of all tiles, as values. Stages of values become empty thousands of cycles after those of keys, so a
// single warp would wait for one kind while the other has an empty stage. Boxes after the last key of a sequence are
// skipped, so neither these rows nor their page-table entries are read.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/mla/sm90/cta_group_map.cuh"
#include "kernels/mla/sm90/page_boxes.cuh"
#include "kernels/mla/sm90/work_tile_finder.cuh"

namespace ringattn::sm90 {

// Loads TMA boxes of tiles: all rows, or, with a peer CTA, half of the rows, multicast to both.
template <class Map>
class CtaGroupBoxes {
 public:
  __device__ __forceinline__ CtaGroupBoxes(const DecodeParams& p, const Map& map)
      : p_(p),
        lane_(thread_of_cta() % 32),
        box_count_(p.boxes / static_cast<int>(map.cta_groups)),
        first_row_(static_cast<int>(map.cta_group) * box_count_ * p.box_rows),
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
      const std::uint32_t to = target + static_cast<std::uint32_t>((first_row_ + i * p_.box_rows) * kPanelRowBytes);
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
  const DecodeParams& p_;
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
  __device__ __forceinline__ CtaGroupKeyProducer(const DecodeParams& p, const Map& map)
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

  const DecodeParams& p_;
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
  __device__ __forceinline__ CtaGroupValueProducer(const DecodeParams& p, const Map& map)
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

  const DecodeParams& p_;
  const Map& map_;
  const CtaGroupBoxes<Map> boxes_;
  bool started_ = false;
  PackedPipelineState<kCtaGroupValueStages> stage_;
};

}  // namespace ringattn::sm90
