// SPDX-License-Identifier: Apache-2.0
// The warp that fetches latents: it looks up pages and has the copy engine bring tiles into shared memory, a panel of
// one page at a time. Boxes behind a sequence's last key are left out, so nothing there is read, not even its page.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/latent/code_rows.cuh"
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
    begin(unit);
    while (tile_ < unit.end) fetch_next(unit);
  }

  // The same tile by tile.
  __device__ __forceinline__ void begin(const DecodeUnit& unit) {
    tile_ = unit.begin;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead_[i] = find(unit, tile_ + i);
  }
  // The next tile's number.
  __device__ __forceinline__ int next() const { return tile_; }
  // Whether there is a place for it.
  __device__ __forceinline__ bool has_place() const {
    const std::uint32_t stage = stage_of(tiles_), parity = parity_of(tiles_) ^ 1U;
    return __all_sync(0xffffffffU,
                      barrier_ended(map_.empty(stage, 0), parity) && barrier_ended(map_.empty(stage, 1), parity)) != 0;
  }
  __device__ __forceinline__ void fetch_next(const DecodeUnit& unit) {
    const Box box = ahead_[0];
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) ahead_[i] = ahead_[i + 1];
    ahead_[kAhead - 1] = find(unit, tile_ + kAhead);
    const int left = unit.of.length - tile_ * kLatentTile;
    const int keys = left < kLatentTile ? left : kLatentTile;
    const int rows = (keys + p_.box_rows - 1) / p_.box_rows * p_.box_rows;
    if constexpr (C::kCodes) {
      fetch_codes(unit.kv_head, box, rows);
    } else {
      fetch(unit.kv_head, box, rows);
    }
    ++tile_;
    ++tiles_;
  }

 private:
  static constexpr int kAhead = C::kCodes ? 1 : 2;  // tiles whose boxes are looked up ahead

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

  // Calls visit(panel) for this lane's panels of its box, of [begin, end).
  template <class Visit>
  __device__ __forceinline__ void for_panels(const Box& box, int begin, int end, Visit visit) const {
    if (box.row < 0) return;
#pragma unroll 1
    for (int panel = begin + lane_ / own_boxes_; panel < end; panel += 32 / own_boxes_) visit(panel);
  }

  __device__ __forceinline__ std::uint32_t place(std::uint32_t stage, int panel) const {
    return map_.tile(stage) + static_cast<std::uint32_t>(panel * LatentMap::kPanelBytes + row_ * kPanelRowBytes);
  }

  // A box into the same panel of each CTA of the cluster.
  __device__ __forceinline__ void load(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier, int column,
                                       int head, const Box& box) const {
    if constexpr (C::kCtas > 1) {
      load_page_box_for((1U << C::kCtas) - 1U, target, &map, barrier, column, head, box.page, box.row);
    } else {
      load_page_box(target, &map, barrier, column, head, box.page, box.row);
    }
  }

  // `rows`: of the tile, those that boxes bring. Each CTA of a cluster fetches its boxes for all of them. A half comes
  // as soon as its place is free.
  __device__ __forceinline__ void fetch(int head, const Box& box, int rows) const {
    const std::uint32_t stage = stage_of(tiles_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = half * kHalfParts, end = half == 0 ? kHalfParts : kLatentParts;
      barrier_wait(map_.empty(stage, static_cast<std::uint32_t>(half)), parity_of(tiles_) ^ 1U);
      if (first <= lane_ && lane_ < end) {
        barrier_arrive_expect(map_.full(stage, lane_), panels_of_part(lane_) * rows * kPanelRowBytes);
      }
      __syncwarp();
      for_panels(box, first * kPartPanels, half == 0 ? end * kPartPanels : kLatentDim / kPanelColumns, [&](int panel) {
        load(place(stage, panel), p_.k, map_.full(stage, panel / kPartPanels), panel * kPanelColumns, head, box);
      });
      __syncwarp();
    }
  }

  // The codes of this CTA's rows, and the rotary keys of all.
  __device__ __forceinline__ void fetch_codes(int head, const Box& box, int rows) const {
    const std::uint32_t stage = stage_of(tiles_);
    const std::uint32_t parity = parity_of(tiles_) ^ 1U;
    const int behind = rows - (row_ - lane_ % own_boxes_ * p_.box_rows);
    constexpr int kMost = kLatentTile / C::kCtas;
    const int own = behind < 0 ? 0 : behind < kMost ? behind : kMost;
    barrier_wait(map_.empty(stage, 1), parity);
    if (lane_ == 0) barrier_arrive_expect(map_.codes_full(stage), own * kLatentDimV);
    __syncwarp();
    for_panels(box, 0, kCodeBlocks, [&](int block) {
      load_page_box(place(stage, kCodeSlot + block), &p_.k, map_.codes_full(stage), block * kPanelColumns, head,
                    box.page, box.row);
    });
    __syncwarp();
    barrier_wait(map_.empty(stage, 0), parity);
    const std::uint32_t full = map_.full(stage, kRopePart);
    if (lane_ == 0) barrier_arrive_expect(full, rows * kPanelRowBytes);
    __syncwarp();
    for_panels(box, 0, 1, [&](int) { load(map_.rope(stage) + row_ * kPanelRowBytes, p_.v, full, 0, head, box); });
    __syncwarp();
  }

  const DecodeParams& p_;
  const LatentMap& map_;
  const int lane_;
  const int own_boxes_;      // of a tile, a power of two
  const int row_;            // where in its tile this lane's box begins
  std::uint32_t tiles_ = 0;  // of all units so far
  int tile_ = 0;             // of the unit, the next one
  Box ahead_[kAhead];        // of the tiles that are next
};

}  // namespace ringattn::sm90
