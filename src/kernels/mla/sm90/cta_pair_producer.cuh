// SPDX-License-Identifier: Apache-2.0
// The producer warp of a CTA in a pair. It finds the work tiles, passes them to the other warps, and loads the tiles
// that its CTA scores: first this CTA's own half, which becomes empty earlier, then the half for both CTAs. Boxes after
// the last key of a sequence are skipped, so neither these rows nor their page-table entries are read.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/mla/sm90/cta_pair_map.cuh"
#include "kernels/mla/sm90/page_boxes.cuh"
#include "kernels/mla/sm90/work_tile_finder.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaPairProducer {
 public:
  __device__ __forceinline__ CtaPairProducer(const DecodeParams& p, const CtaPairMap& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), infos_(map) {}

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
    std::uint32_t own = first + ((first ^ map_.rank) & 1U);
    PageBox next = box_of_lane(p_, work_tile, tile_at(own), 0, p_.boxes);
    const bool first_work_tile = infos_.none();
    infos_.await();
    if (tiles_ != first) {
      // Waits until the final sums of the work tile two before this one have been read. The consumers cannot wait for
      // this: a CTA that scores no work tile's last tile for a while would see two phases as one.
      const MlaPipelineState state = MlaPipelineState::of(work_tiles_);
      barrier_wait(map_.final_sums_empty(state.index), state.parity ^ 1U);
      ++work_tiles_;
    }
    infos_.send(work_tile);
    if (first_work_tile) named_sync(kCtaPairQueryBarrier, kWarpgroup + 32);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += 2) {
      const PageBox box = next;
      next = box_of_lane(p_, work_tile, tile_at(own + 2), 0, p_.boxes);
      load(work_tile.kv_head, own, box, work_tile.seq_info.length - tile_at(own) * kMlaKeyTile);
    }
  }

  // Loads the boxes of `kPanels` panels to `target`, or to the same address of both CTAs. column_of(n): first column of
  // the n-th panel.
  template <int kPanels, bool kForBoth, class ColumnOf>
  __device__ __forceinline__ void issue_loads(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier,
                                              int head, const PageBox& of_lane, ColumnOf column_of) const {
    for_boxes(of_lane, p_.boxes, [&](int i, const PageBox& box) {
      const std::uint32_t rows = target + static_cast<std::uint32_t>(i * p_.box_rows * kPanelRowBytes);
#pragma unroll
      for (int n = 0; n < kPanels; ++n) {
        const std::uint32_t panel = rows + static_cast<std::uint32_t>(n * CtaPairMap::kPanelBytes);
        if constexpr (kForBoth) {
          tma_multicast_page_box_once(3, panel, &map, barrier, column_of(n), head, box.page, box.row);
        } else {
          tma_load_page_box_once(panel, &map, barrier, column_of(n), head, box.page, box.row);
        }
      }
    });
  }

  // `left`: keys of the sequence from the tile's first key on.
  __device__ __forceinline__ void load(int head, std::uint32_t tile, const PageBox& box, int left) const {
    const MlaPipelineState state = cta_pair_pipeline_state(warp_uniform(tile));
    const std::uint32_t rank = map_.rank;
    const int rows = box_rows_of(p_, left);
    const int own_column = static_cast<int>(rank) * kCtaPairColumns;
    const std::uint32_t own_full = map_.own_full(state.index), rope_full = map_.rope_full(state.index);
    const std::uint32_t own = map_.own_half(state.index);
    barrier_wait(map_.own_empty(state.index), state.parity ^ 1U);
    if (C::kFp8 && lane_ == 0) barrier_arrive_expect(map_.fp8_full(state.index), rows * kLatentDimV);
    if (!C::kFp8 && lane_ == 0) barrier_arrive_expect(own_full, kCtaPairPanels * rows * kPanelRowBytes);
    __syncwarp();
    if constexpr (C::kFp8) {
      // The fp8 values of blocks, in the order of dequantization.
      issue_loads<kScaleBlocks, false>(own, p_.k, map_.fp8_full(state.index), head, box, [rank](int n) {
        return static_cast<int>(CtaPairMap::block_of(rank, static_cast<std::uint32_t>(n))) * kPanelColumns;
      });
    } else {
      issue_loads<kCtaPairPanels, false>(own, p_.k, own_full, head, box,
                                         [=](int n) { return own_column + n * kPanelColumns; });
    }
    const std::uint32_t shared_full = map_.shared_full(rank, state.index);
    const std::uint32_t shared = map_.shared_half(rank, state.index);
    barrier_wait(map_.shared_empty(state.index), state.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(rope_full, rows * kPanelRowBytes);
      if (!C::kFp8) barrier_arrive_expect(shared_full, kCtaPairPanels * rows * kPanelRowBytes);
      // Dequantized tiles are sent with all rows.
      barrier_arrive_expect_at(map_to_cta(shared_full, 1U - rank),
                               kCtaPairPanels * (C::kFp8 ? kMlaKeyTile : rows) * kPanelRowBytes);
    }
    __syncwarp();
    if constexpr (C::kFp8) {
      issue_loads<1, false>(map_.rope(state.index), p_.v, rope_full, head, box, [](int) { return 0; });
    } else {
      issue_loads<kCtaPairPanels, true>(shared, p_.k, shared_full, head, box,
                                        [=](int n) { return kCtaPairColumns - own_column + n * kPanelColumns; });
      issue_loads<1, false>(map_.rope(state.index), p_.k, rope_full, head, box, [](int) { return kLatentDimV; });
    }
  }

  const DecodeParams& p_;
  const CtaPairMap& map_;
  const int lane_;
  WorkTileInfoWriter<CtaPairMap> infos_;
  std::uint32_t work_tiles_ = 0;  // non-empty work tiles so far
  std::uint32_t tiles_ = 0;       // over all work tiles so far
};

}  // namespace ringattn::sm90
