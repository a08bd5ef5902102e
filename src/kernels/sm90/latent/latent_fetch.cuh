// SPDX-License-Identifier: Apache-2.0
// The warp that fetches latents: it looks up pages and has the copy engine bring tiles into shared memory, a panel of
// one page at a time. Boxes behind a sequence's last key are left out, so nothing there is read, not even its page.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/latent/latent_map.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

class LatentFetcher {
 public:
  __device__ __forceinline__ LatentFetcher(const DecodeParams& p, const LatentMap& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), row_(lane_ % p.boxes * p.box_rows) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit, int) {
    Box ahead = find(unit, unit.begin);
#pragma unroll 1
    for (int tile = unit.begin; tile < unit.end; ++tile, ++tiles_) {
      const Box box = ahead;
      ahead = find(unit, tile + 1);
      fetch(unit.kv_head, box, unit.of.length - tile * kLatentTile);
    }
  }

 private:
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

  // `left`: keys of the sequence from the tile's first one on.
  __device__ __forceinline__ void fetch(int head, const Box& box, int left) const {
    const std::uint32_t stage = stage_of(tiles_);
    const int keys = left < kLatentTile ? left : kLatentTile;
    const int rows = (keys + p_.box_rows - 1) / p_.box_rows * p_.box_rows;
    barrier_wait(map_.empty(stage), parity_of(tiles_) ^ 1U);
    if (lane_ < kLatentParts) {
      barrier_arrive_expect(map_.full(stage, lane_), panels_of_part(lane_) * rows * kPanelRowBytes);
    }
    __syncwarp();
    if (box.row < 0) return;
    const std::uint32_t to = map_.tile(stage) + static_cast<std::uint32_t>(row_ * kPanelRowBytes);
    // Lane i has box i % boxes, of panel i / boxes and of those behind it: boxes divide 32.
#pragma unroll 1
    for (int panel = lane_ / p_.boxes; panel < kLatentDim / kPanelColumns; panel += 32 / p_.boxes) {
      load_page_box(to + static_cast<std::uint32_t>(panel * LatentMap::kPanelBytes), &p_.k,
                    map_.full(stage, panel / kHalfPanels), panel * kPanelColumns, head, box.page, box.row);
    }
  }

  const DecodeParams& p_;
  const LatentMap& map_;
  const int lane_;
  const int row_;  // where in its tile this lane's box begins
  std::uint32_t tiles_ = 0;
};

}  // namespace ringattn::sm90
