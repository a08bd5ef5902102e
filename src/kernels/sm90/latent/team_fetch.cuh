// SPDX-License-Identifier: Apache-2.0
// The fetching warps of a CTA of a team: one has the copy engine bring the tiles that the CTA scores, as keys, the
// other one the CTA's columns of all tiles, as values. Places of keys are free when scorers have done with them, those
// of values when outputs have, which is thousands of cycles later: one warp for both would wait for one with the other
// free. Boxes behind a sequence's last key are left out, so nothing there is read, not even its page.
#pragma once

#include "kernels/sm90/latent/page_boxes.cuh"
#include "kernels/sm90/latent/team_map.cuh"
#include "kernels/sm90/latent/unit_finder.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

// Copies of boxes of tiles: of all rows, or, with a twin, of half of them, for both.
template <class Map>
class TeamBoxes {
 public:
  __device__ __forceinline__ TeamBoxes(const DecodeParams& p, const Map& map)
      : p_(p),
        lane_(thread_of_cta() % 32),
        count_(p.boxes / static_cast<int>(map.teams)),
        first_row_(static_cast<int>(map.team) * count_ * p.box_rows),
        twins_(map.teams > 1 ? static_cast<std::uint16_t>(1U << map.twin(0) | 1U << map.twin(1)) : std::uint16_t{0}) {}

  // This lane's box of a tile.
  __device__ __forceinline__ PageBox find(const DecodeUnit& unit, int tile) const {
    return box_of_lane(p_, unit, tile, first_row_, count_);
  }
  // `panels` panels, kMost at most, from `column` on become those at `target`; `rows`: that they have, whoever brings
  // them.
  template <int kMost>
  __device__ __forceinline__ void bring(int panels, std::uint32_t target, std::uint32_t full, int rows, int head,
                                        const PageBox& of_lane, int column) const {
    if (lane_ == 0) barrier_arrive_expect(full, panels * rows * kPanelRowBytes);
    __syncwarp();
    for_boxes(of_lane, count_, [&](int i, const PageBox& box) {
      const std::uint32_t to = target + static_cast<std::uint32_t>((first_row_ + i * p_.box_rows) * kPanelRowBytes);
#pragma unroll
      for (int n = 0; n < kMost; ++n) {
        if (n >= panels) break;
        const std::uint32_t panel = to + static_cast<std::uint32_t>(n * Map::kPanelBytes);
        const int from = column + n * kPanelColumns;
        if (twins_ != 0) {
          load_page_box_once_for(twins_, panel, &p_.k, full, from, head, box.page, box.row);
        } else {
          load_page_box_once(panel, &p_.k, full, from, head, box.page, box.row);
        }
      }
    });
  }

 private:
  const DecodeParams& p_;
  const int lane_;
  const int count_;            // of a tile, this CTA's
  const int first_row_;        // where in a tile they begin
  const std::uint16_t twins_;  // bits by rank in the cluster; 0: there is no twin
};

// The warp that finds out about units, tells the others, and has the tiles that its CTA scores brought as keys, part by
// part, each as soon as there is a place for it.
template <class C>
class TeamKeyFetcher {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ TeamKeyFetcher(const DecodeParams& p, const Map& map)
      : p_(p), map_(map), boxes_(p, map), notes_(map) {}

  // Units first, first + step, …
  __device__ __forceinline__ void run(int first, int step) {
    UnitFinder<C> finder(p_);
    const int units = finder.count();
#pragma unroll 1
    for (int n = first; n < units; n += step) take(finder.find(n));
    notes_.tell_end();
  }

 private:
  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    const auto tile_at = [&](std::uint32_t number) { return unit.begin + static_cast<int>(number - first); };
    std::uint32_t own = map_.first_own(first);
    PageBox next = boxes_.find(unit, tile_at(own));
    const bool begins = notes_.none();
    notes_.await();
    notes_.tell(unit);
    if (begins) barrier_wait(map_.queries_asked(), 0);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += Map::kCtas) {
      const PageBox box = next;
      next = boxes_.find(unit, tile_at(own + Map::kCtas));
      const int rows = box_rows_of(p_, unit.of.length - tile_at(own) * kLatentTile);
#pragma unroll 1
      for (std::uint32_t part = 0; part < kTeamParts; ++part) {
        fetch(unit.kv_head, of_warp(own / Map::kCtas), of_warp(part), box, rows);
      }
    }
  }

  // A part of the n-th tile that this CTA scores.
  __device__ __forceinline__ void fetch(int head, std::uint32_t n, std::uint32_t part, const PageBox& box,
                                        int rows) const {
    // The tile that has been scored when its place is free.
    const LatentTurn scored = LatentTurn::of(part < Map::kEarlyParts ? n - 2 : n - 1);
    barrier_wait(map_.keys_empty(scored.place), scored.parity);
    boxes_.template bring<kTeamPartPanels>(kTeamPartPanels, map_.keys(n, part), map_.keys_full(n, part), rows, head,
                                           box, static_cast<int>(part) * kTeamPartPanels * kPanelColumns);
  }

  const DecodeParams& p_;
  const Map& map_;
  const TeamBoxes<Map> boxes_;
  NoteWriter<Map> notes_;
  std::uint32_t tiles_ = 0;  // of all units so far
};

// The warp that has the CTA's columns of all tiles brought as values.
template <class C>
class TeamValueFetcher {
  using Map = typename C::Map;

 public:
  __device__ __forceinline__ TeamValueFetcher(const DecodeParams& p, const Map& map)
      : p_(p), map_(map), boxes_(p, map) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    PageBox next = boxes_.find(unit, unit.begin);
    if (!begun_) barrier_wait(map_.queries_asked(), 0);
    begun_ = true;
#pragma unroll 1
    for (int tile = unit.begin; tile < unit.end; ++tile) {
      const PageBox box = next;
      next = boxes_.find(unit, tile + 1);
      fetch(unit.kv_head, box, box_rows_of(p_, unit.of.length - tile * kLatentTile));
    }
  }

 private:
  __device__ __forceinline__ void fetch(int head, const PageBox& box, int rows) {
    const std::uint32_t place = of_warp(place_.stage());
    barrier_wait(map_.values_empty(place), place_.parity() ^ 1U);
    boxes_.template bring<Map::kPanels>(map_.panels(), map_.values(place), map_.values_full(place), rows, head, box,
                                        static_cast<int>(map_.rank) * Map::kColumns);
    place_.advance();
  }

  const DecodeParams& p_;
  const Map& map_;
  const TeamBoxes<Map> boxes_;
  bool begun_ = false;
  RingCursor<kTeamValuePlaces> place_;
};

}  // namespace ringattn::sm90
