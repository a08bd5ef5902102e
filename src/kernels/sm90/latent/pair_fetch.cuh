// SPDX-License-Identifier: Apache-2.0
// The warp of a pair's CTA that finds out about units, tells those who fold, and has the copy engine bring the tiles
// that its CTA scores, a panel of one page at a time: first what this CTA alone has, whose place is free earlier, then
// the half for both CTAs. Boxes behind a sequence's last key are left out, so nothing there is read, not even its page.
#pragma once

#include "kernels/sm90/latent/page_boxes.cuh"
#include "kernels/sm90/latent/pair_map.cuh"
#include "kernels/sm90/latent/unit_finder.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class PairFetcher {
 public:
  __device__ __forceinline__ PairFetcher(const DecodeParams& p, const PairMap& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), notes_(map) {}

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
    std::uint32_t own = first + ((first ^ map_.rank) & 1U);
    PageBox next = box_of_lane(p_, unit, tile_at(own), 0, p_.boxes);
    const bool begins = notes_.none();
    notes_.await();
    if (tiles_ != first) {
      // Until the ends of the unit before the last one have been read. Whoever folds could not wait for this: a CTA
      // that tells of no unit's end for a while would take two phases for one.
      const LatentTurn turn = LatentTurn::of(units_);
      barrier_wait(map_.ends_empty(turn.place), turn.parity ^ 1U);
      ++units_;
    }
    notes_.tell(unit);
    if (begins) named_sync(kPairQueryBarrier, kWarpgroup + 32);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += 2) {
      const PageBox box = next;
      next = box_of_lane(p_, unit, tile_at(own + 2), 0, p_.boxes);
      fetch(unit.kv_head, own, box, unit.of.length - tile_at(own) * kLatentTile);
    }
  }

  // Has the copy engine bring the boxes of `kPanels` panels to `target`, or to there in both CTAs. column_of(n): the
  // first column of the n-th.
  template <int kPanels, bool kForBoth, class ColumnOf>
  __device__ __forceinline__ void bring(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier, int head,
                                        const PageBox& of_lane, ColumnOf column_of) const {
    for_boxes(of_lane, p_.boxes, [&](int i, const PageBox& box) {
      const std::uint32_t rows = target + static_cast<std::uint32_t>(i * p_.box_rows * kPanelRowBytes);
#pragma unroll
      for (int n = 0; n < kPanels; ++n) {
        const std::uint32_t panel = rows + static_cast<std::uint32_t>(n * PairMap::kPanelBytes);
        if constexpr (kForBoth) {
          load_page_box_once_for(3, panel, &map, barrier, column_of(n), head, box.page, box.row);
        } else {
          load_page_box_once(panel, &map, barrier, column_of(n), head, box.page, box.row);
        }
      }
    });
  }

  // `left`: keys of the sequence from the tile's first one on.
  __device__ __forceinline__ void fetch(int head, std::uint32_t tile, const PageBox& box, int left) const {
    const LatentTurn turn = pair_turn(of_warp(tile));
    const std::uint32_t rank = map_.rank;
    const int rows = box_rows_of(p_, left);
    const int own_column = static_cast<int>(rank) * kPairColumns;
    const std::uint32_t own_full = map_.own_full(turn.place), rope_full = map_.rope_full(turn.place);
    const std::uint32_t own = map_.own_half(turn.place);
    barrier_wait(map_.own_empty(turn.place), turn.parity ^ 1U);
    if (C::kCodes && lane_ == 0) barrier_arrive_expect(map_.codes_full(turn.place), rows * kLatentDimV);
    if (!C::kCodes && lane_ == 0) barrier_arrive_expect(own_full, kPairPanels * rows * kPanelRowBytes);
    __syncwarp();
    if constexpr (C::kCodes) {
      // Where the codes of the block lie that is expanded after so many others.
      bring<kCodeBlocks, false>(own, p_.k, map_.codes_full(turn.place), head, box, [rank](int n) {
        return static_cast<int>(PairMap::block_of(rank, static_cast<std::uint32_t>(n))) * kPanelColumns;
      });
    } else {
      bring<kPairPanels, false>(own, p_.k, own_full, head, box, [=](int n) { return own_column + n * kPanelColumns; });
    }
    const std::uint32_t shared_full = map_.shared_full(rank, turn.place);
    const std::uint32_t shared = map_.shared_half(rank, turn.place);
    barrier_wait(map_.shared_empty(turn.place), turn.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(rope_full, rows * kPanelRowBytes);
      if (!C::kCodes) barrier_arrive_expect(shared_full, kPairPanels * rows * kPanelRowBytes);
      // What is expanded is sent as a whole.
      barrier_arrive_expect_at(in_cta(shared_full, 1U - rank),
                               kPairPanels * (C::kCodes ? kLatentTile : rows) * kPanelRowBytes);
    }
    __syncwarp();
    if constexpr (C::kCodes) {
      bring<1, false>(map_.rope(turn.place), p_.v, rope_full, head, box, [](int) { return 0; });
    } else {
      bring<kPairPanels, true>(shared, p_.k, shared_full, head, box,
                               [=](int n) { return kPairColumns - own_column + n * kPanelColumns; });
      bring<1, false>(map_.rope(turn.place), p_.k, rope_full, head, box, [](int) { return kLatentDimV; });
    }
  }

  const DecodeParams& p_;
  const PairMap& map_;
  const int lane_;
  NoteWriter<PairMap> notes_;
  std::uint32_t units_ = 0;  // that have tiles
  std::uint32_t tiles_ = 0;  // of all units so far
};

}  // namespace ringattn::sm90
