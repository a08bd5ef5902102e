// SPDX-License-Identifier: Apache-2.0
// The producer warp of mla_kernel: looks up pages and issues TMA loads of key tiles, one panel of one page at a time.
// Boxes after the last key of a sequence are skipped, so neither these rows nor their page-table entries are read.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/work_tiles.cuh"
#include "kernels/mla/sm90/fp8_rows.cuh"
#include "kernels/mla/sm90/mla_map.cuh"
#include "kernels/mla/sm90/page_boxes.cuh"

namespace ringattn::sm90 {

template <class C>
class MlaProducer {
 public:
  // `rank`: of this CTA in its cluster.
  __device__ __forceinline__ MlaProducer(const DecodeParams& p, const MlaMap& map, std::uint32_t rank)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        own_boxes_(p.boxes / C::kCtas),
        first_row_(static_cast<int>(rank) * own_boxes_ * p.box_rows) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    begin(work_tile);
    while (tile_ < work_tile.end) load_next(work_tile);
  }

  // The same tile by tile, for MlaDequantizer.
  __device__ __forceinline__ void begin(const DecodeWorkTile& work_tile) {
    tile_ = work_tile.begin;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next_boxes_[i] = find(work_tile, tile_ + i);
  }
  // Index of the next tile in its sequence.
  __device__ __forceinline__ int next() const { return tile_; }
  // True if the next tile's stage is empty.
  __device__ __forceinline__ bool has_free_stage() const {
    const std::uint32_t stage = stage_of(tiles_), parity = parity_of(tiles_) ^ 1U;
    return __all_sync(0xffffffffU,
                      barrier_ended(map_.empty(stage, 0), parity) && barrier_ended(map_.empty(stage, 1), parity)) != 0;
  }
  __device__ __forceinline__ void load_next(const DecodeWorkTile& work_tile) {
    const PageBox box = next_boxes_[0];
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) next_boxes_[i] = next_boxes_[i + 1];
    next_boxes_[kAhead - 1] = find(work_tile, tile_ + kAhead);
    const int rows = box_rows_of(p_, work_tile.seq_info.length - tile_ * kMlaKeyTile);
    if constexpr (C::kFp8) {
      load_fp8(work_tile.kv_head, box, rows);
    } else {
      load_half<0>(work_tile.kv_head, box, rows);
      load_half<1>(work_tile.kv_head, box, rows);
    }
    ++tile_;
    ++tiles_;
  }

 private:
  static constexpr int kAhead = C::kFp8 ? 1 : 2;  // tiles whose pages are looked up in advance

  __device__ __forceinline__ PageBox find(const DecodeWorkTile& work_tile, int tile) const {
    return box_of_lane(p_, work_tile, tile, first_row_, own_boxes_);
  }

  // Loads this CTA's boxes of panels [kBegin, kEnd), multicast to the cluster if kForAll. Column `column` is the first
  // column of panel kBegin. Panel i arrives on barrier_of(i).
  template <int kBegin, int kEnd, bool kForAll, class BarrierOf>
  __device__ __forceinline__ void issue_loads(const CUtensorMap& map, int head, const PageBox& of_lane, int column,
                                              BarrierOf barrier_of) const {
    const std::uint32_t tile = warp_uniform(map_.tile(stage_of(tiles_)));
    for_boxes(of_lane, own_boxes_, [&](int i, const PageBox& box) {
      const std::uint32_t rows = tile + static_cast<std::uint32_t>((first_row_ + i * p_.box_rows) * kPanelRowBytes);
#pragma unroll
      for (int panel = kBegin; panel < kEnd; ++panel) {
        const std::uint32_t target = rows + static_cast<std::uint32_t>(panel * MlaMap::kPanelBytes);
        const int from = column + (panel - kBegin) * kPanelColumns;
        if constexpr (kForAll && C::kCtas > 1) {
          tma_multicast_page_box_once((1U << C::kCtas) - 1U, target, &map, barrier_of(panel), from, head, box.page,
                                      box.row);
        } else {
          tma_load_page_box_once(target, &map, barrier_of(panel), from, head, box.page, box.row);
        }
      }
    });
  }

  // Loads one half of a tile as soon as its columns are empty. The rotary keys are loaded with the second half. `rows`:
  // rows of the tile that boxes load. Each CTA multicasts its boxes to the cluster.
  template <int kHalf>
  __device__ __forceinline__ void load_half(int head, const PageBox& box, int rows) const {
    constexpr int kFirst = kHalf * kHalfParts, kEnd = kHalf == 0 ? kHalfParts : kMlaTileParts;
    const std::uint32_t stage = warp_uniform(stage_of(tiles_));
    barrier_wait(map_.empty(stage, kHalf), parity_of(tiles_) ^ 1U);
    if (kFirst <= lane_ && lane_ < kEnd) {
      barrier_arrive_expect(map_.full(stage, lane_), panels_of_part(lane_) * rows * kPanelRowBytes);
    }
    __syncwarp();
    constexpr int kPanel = kFirst * kPartPanels;
    issue_loads<kPanel, kHalf == 0 ? kEnd * kPartPanels : kLatentDim / kPanelColumns, true>(
        p_.k, head, box, kPanel * kPanelColumns, [&](int panel) { return map_.full(stage, panel / kPartPanels); });
  }

  // Loads the fp8 values of this CTA's rows, and the rotary keys for all CTAs.
  __device__ __forceinline__ void load_fp8(int head, const PageBox& box, int rows) const {
    const std::uint32_t stage = warp_uniform(stage_of(tiles_));
    const std::uint32_t parity = parity_of(tiles_) ^ 1U;
    const int rows_left = rows - first_row_;
    constexpr int kMax = kMlaKeyTile / C::kCtas;
    const int own = rows_left < 0 ? 0 : rows_left < kMax ? rows_left : kMax;
    barrier_wait(map_.empty(stage, 1), parity);
    if (lane_ == 0) barrier_arrive_expect(map_.fp8_full(stage), own * kLatentDimV);
    __syncwarp();
    issue_loads<kFp8Panel, kFp8Panel + kScaleBlocks, false>(p_.k, head, box, 0,
                                                            [&](int) { return map_.fp8_full(stage); });
    barrier_wait(map_.empty(stage, 0), parity);
    if (lane_ == 0) barrier_arrive_expect(map_.full(stage, kRopePart), rows * kPanelRowBytes);
    __syncwarp();
    constexpr int kRope = kLatentDimV / kPanelColumns;
    issue_loads<kRope, kRope + 1, true>(p_.v, head, box, 0, [&](int) { return map_.full(stage, kRopePart); });
  }

  const DecodeParams& p_;
  const MlaMap& map_;
  const int lane_;
  const int own_boxes_;         // per tile, a power of two
  const int first_row_;         // this CTA's first row of a tile
  std::uint32_t tiles_ = 0;     // over all work tiles so far
  int tile_ = 0;                // the work tile's next tile
  PageBox next_boxes_[kAhead];  // boxes of the next tiles
};

}  // namespace ringattn::sm90
