// SPDX-License-Identifier: Apache-2.0
// The warp that fetches latents: it looks up pages and has the copy engine bring tiles into shared memory, a panel of
// one page at a time. Boxes behind a sequence's last key are left out, so nothing there is read, not even its page.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/latent/latent_map.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class LatentFetcher {
 public:
  // `rank`: of the CTA in its cluster.
  __device__ __forceinline__ LatentFetcher(const DecodeParams& p, const LatentMap& map, std::uint32_t rank)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        own_boxes_(p.boxes / C::kCtas),
        row_((static_cast<int>(rank) * own_boxes_ + lane_ % own_boxes_) * p.box_rows) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    Box ahead[kAhead];  // of the tiles that are next
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = find(unit, unit.begin + i);
#pragma unroll 1
    for (int tile = unit.begin; tile < unit.end; ++tile, ++tiles_) {
      const Box box = ahead[0];
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
      ahead[kAhead - 1] = find(unit, tile + kAhead);
      fetch(unit.kv_head, box, unit.of.length - tile * kLatentTile);
    }
  }

 private:
  static constexpr int kAhead = 2;  // tiles whose boxes are looked up ahead

  struct Box {
    int page;
    int row;  // in the page; −1: no key of the sequence lies there
  };

  // This lane's box of a tile, the one that begins row_ keys behind the tile's first.
  __device__ __forceinline__ Box find(const DecodeUnit& unit, int tile) const {
    const int key = tile * kLatentTile + row_;
    if (tile >= unit.end || key >= unit.of.length) return {0, -1};
    const int here = key - unit.lag;
    if (p_.pages == nullptr) return {unit.sequence, here};
    return {__ldg(p_.pages + unit.sequence * p_.table_stride + (here >> p_.page_log)), here & ((1 << p_.page_log) - 1)};
  }

  // Calls visit(panel) for this lane's panels of its box: lane i has panel i / own_boxes_, and those behind it.
  template <class Visit>
  __device__ __forceinline__ void for_panels(const Box& box, Visit visit) const {
    if (box.row < 0) return;
#pragma unroll 1
    for (int panel = lane_ / own_boxes_; panel < kLatentDim / kPanelColumns; panel += 32 / own_boxes_) visit(panel);
  }

  // `left`: keys of the sequence from the tile's first one on. Each CTA of a cluster fetches its boxes for all of them.
  __device__ __forceinline__ void fetch(int head, const Box& box, int left) const {
    const std::uint32_t stage = stage_of(tiles_);
    const int keys = left < kLatentTile ? left : kLatentTile;
    const int rows = (keys + p_.box_rows - 1) / p_.box_rows * p_.box_rows;
    barrier_wait(map_.empty(stage), parity_of(tiles_) ^ 1U);
    if (lane_ < kLatentParts) {
      barrier_arrive_expect(map_.full(stage, lane_), panels_of_part(lane_) * rows * kPanelRowBytes);
    }
    __syncwarp();
    const std::uint32_t to = map_.tile(stage) + static_cast<std::uint32_t>(row_ * kPanelRowBytes);
    for_panels(box, [&](int panel) {
      const std::uint32_t target = to + static_cast<std::uint32_t>(panel * LatentMap::kPanelBytes);
      const std::uint32_t barrier = map_.full(stage, panel / kHalfPanels);
      if constexpr (C::kCtas > 1) {
        load_page_box_for((1U << C::kCtas) - 1U, target, &p_.k, barrier, panel * kPanelColumns, head, box.page,
                          box.row);
      } else {
        load_page_box(target, &p_.k, barrier, panel * kPanelColumns, head, box.page, box.row);
      }
    });
    __syncwarp();
  }

  const DecodeParams& p_;
  const LatentMap& map_;
  const int lane_;
  const int own_boxes_;  // of a tile, a power of two
  const int row_;        // where in its tile this lane's box begins
  std::uint32_t tiles_ = 0;
};

}  // namespace ringattn::sm90
