// SPDX-License-Identifier: Apache-2.0
// The warp of a pair's CTA that finds out about work_tiles, tells those who attention, and has the copy engine
// issue_loads the tiles that its CTA scores, a panel of one page at a time: first what this CTA alone has, whose place
// is free earlier, then the half for both CTAs. Boxes behind a sequence's last key are left out, so nothing there is
// read, not even its page.
#pragma once

#include "kernels/sm90/latent/cta_pair_map.cuh"
#include "kernels/sm90/latent/page_boxes.cuh"
#include "kernels/sm90/latent/work_tile_finder.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class CtaPairProducer {
 public:
  __device__ __forceinline__ CtaPairProducer(const DecodeParams& p, const CtaPairMap& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), infos_(map) {}

  // Units first, first + step, …
  __device__ __forceinline__ void run(int first, int step) {
    WorkTileFinder<C> work_tile_finder(p_);
    const int work_tiles = work_tile_finder.count();
#pragma unroll 1
    for (int n = first; n < work_tiles; n += step) take(work_tile_finder.find(n));
    infos_.send_end();
  }

 private:
  __device__ __forceinline__ void take(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    const auto tile_at = [&](std::uint32_t number) { return work_tile.begin + static_cast<int>(number - first); };
    std::uint32_t own = first + ((first ^ map_.rank) & 1U);
    PageBox next = box_of_lane(p_, work_tile, tile_at(own), 0, p_.boxes);
    const bool begins = infos_.none();
    infos_.await();
    if (tiles_ != first) {
      // Until the ends of the work_tile before the last one have been read. Whoever folds could not wait for this: a
      // CTA that tells of no work_tile's end for a while would take two phases for one.
      const MlaPipelineState turn = MlaPipelineState::of(work_tiles_);
      barrier_wait(map_.ends_empty(turn.index), turn.parity ^ 1U);
      ++work_tiles_;
    }
    infos_.send(work_tile);
    if (begins) named_sync(kCtaPairQueryBarrier, kWarpgroup + 32);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += 2) {
      const PageBox box = next;
      next = box_of_lane(p_, work_tile, tile_at(own + 2), 0, p_.boxes);
      fetch(work_tile.kv_head, own, box, work_tile.of.length - tile_at(own) * kMlaKeyTile);
    }
  }

  // Has the copy engine issue_loads the boxes of `kPanels` panels to `target`, or to there in both CTAs. column_of(n):
  // the first column of the n-th.
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

  // `left`: keys of the sequence from the tile's first one on.
  __device__ __forceinline__ void fetch(int head, std::uint32_t tile, const PageBox& box, int left) const {
    const MlaPipelineState turn = cta_pair_pipeline_state(of_warp(tile));
    const std::uint32_t rank = map_.rank;
    const int rows = box_rows_of(p_, left);
    const int own_column = static_cast<int>(rank) * kCtaPairColumns;
    const std::uint32_t own_full = map_.own_full(turn.index), rope_full = map_.rope_full(turn.index);
    const std::uint32_t own = map_.own_half(turn.index);
    barrier_wait(map_.own_empty(turn.index), turn.parity ^ 1U);
    if (C::kFp8 && lane_ == 0) barrier_arrive_expect(map_.fp8_full(turn.index), rows * kLatentDimV);
    if (!C::kFp8 && lane_ == 0) barrier_arrive_expect(own_full, kCtaPairPanels * rows * kPanelRowBytes);
    __syncwarp();
    if constexpr (C::kFp8) {
      // Where the fp8 of the block lie that is expanded after so many others.
      issue_loads<kScaleBlocks, false>(own, p_.k, map_.fp8_full(turn.index), head, box, [rank](int n) {
        return static_cast<int>(CtaPairMap::block_of(rank, static_cast<std::uint32_t>(n))) * kPanelColumns;
      });
    } else {
      issue_loads<kCtaPairPanels, false>(own, p_.k, own_full, head, box,
                                         [=](int n) { return own_column + n * kPanelColumns; });
    }
    const std::uint32_t shared_full = map_.shared_full(rank, turn.index);
    const std::uint32_t shared = map_.shared_half(rank, turn.index);
    barrier_wait(map_.shared_empty(turn.index), turn.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(rope_full, rows * kPanelRowBytes);
      if (!C::kFp8) barrier_arrive_expect(shared_full, kCtaPairPanels * rows * kPanelRowBytes);
      // What is expanded is sent as a whole.
      barrier_arrive_expect_at(in_cta(shared_full, 1U - rank),
                               kCtaPairPanels * (C::kFp8 ? kMlaKeyTile : rows) * kPanelRowBytes);
    }
    __syncwarp();
    if constexpr (C::kFp8) {
      issue_loads<1, false>(map_.rope(turn.index), p_.v, rope_full, head, box, [](int) { return 0; });
    } else {
      issue_loads<kCtaPairPanels, true>(shared, p_.k, shared_full, head, box,
                                        [=](int n) { return kCtaPairColumns - own_column + n * kPanelColumns; });
      issue_loads<1, false>(map_.rope(turn.index), p_.k, rope_full, head, box, [](int) { return kLatentDimV; });
    }
  }

  const DecodeParams& p_;
  const CtaPairMap& map_;
  const int lane_;
  WorkTileInfoWriter<CtaPairMap> infos_;
  std::uint32_t work_tiles_ = 0;  // that have tiles
  std::uint32_t tiles_ = 0;       // of all work_tiles so far
};

}  // namespace ringattn::sm90
