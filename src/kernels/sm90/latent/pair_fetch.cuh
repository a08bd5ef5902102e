// SPDX-License-Identifier: Apache-2.0
// The warp of a pair's CTA that finds out about units, tells those who fold, and has the copy engine bring the tiles
// that its CTA scores, a panel of one page at a time: first what this CTA alone has, whose place is free earlier, then
// the half for both CTAs. Boxes behind a sequence's last key are left out, so nothing there is read, not even its page.
#pragma once

#include "kernels/sm90/latent/page_boxes.cuh"
#include "kernels/sm90/latent/pair_map.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

template <class C>
class PairFetcher {
 public:
  __device__ __forceinline__ PairFetcher(const DecodeParams& p, const PairMap& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32) {}

  // Units first, first + step, …
  __device__ __forceinline__ void run(int first, int step) {
    const int units = count();
#pragma unroll 1
    for (int n = first; n < units; n += step) take(find_unit(n));
    await_note();
    if (lane_ == 0) map_.note(PairTurn::of_unit(notes_).place).write_end();
    tell_note();
  }

 private:
  // A lane counts the units of some sequences that follow each other.
  __device__ __forceinline__ int units_of(int sequence) const {
    if (sequence >= p_.sequences) return 0;
    return sequence_of<C>(p_, sequence).groups * p_.fold.kv_heads * p_.blocks;
  }
  // What the lanes before this one have.
  __device__ __forceinline__ int before(int own) const {
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, sum, step);
      if (lane_ >= step) sum += other;
    }
    return sum - own;
  }
  // Returns how many units there are.
  __device__ __forceinline__ int count() {
    each_ = (p_.sequences + 31) / 32;
    int own = 0;
#pragma unroll 1
    for (int i = 0; i < each_; ++i) own += units_of(lane_ * each_ + i);
    own_ = own;
    before_ = before(own);
    return __shfl_sync(0xffffffffU, before_ + own, 31);
  }
  __device__ __forceinline__ DecodeUnit find_unit(int number) const {
    // The last lane with no more units before it, and of its sequences, of which each lane takes one, the same.
    const int lane = __popc(__ballot_sync(0xffffffffU, before_ <= number)) - 1;
    const int sequences_before = __shfl_sync(0xffffffffU, before_, lane);
    static_assert(kMostLatentSequences <= 32 * 32);
    const int of_lane = __shfl_sync(0xffffffffU, own_, lane);
    const int own = lane_ >= each_ ? 0 : each_ == 1 ? of_lane : units_of(lane * each_ + lane_);
    const int first = sequences_before + before(own);
    const int nth = __popc(__ballot_sync(0xffffffffU, lane_ < each_ && first <= number)) - 1;
    return unit_in<C>(p_, lane * each_ + nth, __shfl_sync(0xffffffffU, first, nth), number);
  }

  __device__ __forceinline__ void await_note() const {
    const PairTurn turn = PairTurn::of_unit(notes_);
    barrier_wait(map_.note_empty(turn.place), turn.parity ^ 1U);
  }
  __device__ __forceinline__ void tell_note() {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.note_full(PairTurn::of_unit(notes_).place));
    ++notes_;
  }

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    const auto tile_at = [&](std::uint32_t number) { return unit.begin + static_cast<int>(number - first); };
    std::uint32_t own = first + ((first ^ map_.rank) & 1U);
    PageBox next = find(unit, tile_at(own));
    await_note();
    if (tiles_ != first) {
      // Until the ends of the unit before the last one have been read. Whoever folds could not wait for this: a CTA
      // that tells of no unit's end for a while would take two phases for one.
      const PairTurn turn = PairTurn::of_unit(units_);
      barrier_wait(map_.ends_empty(turn.place), turn.parity ^ 1U);
      ++units_;
    }
    if (lane_ == 0) map_.note(PairTurn::of_unit(notes_).place).write(unit);
    tell_note();
    if (notes_ == 1) named_sync(kPairQueryBarrier, kWarpgroup + 32);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += 2) {
      const PageBox box = next;
      next = find(unit, tile_at(own + 2));
      fetch(unit.kv_head, own, box, unit.of.length - tile_at(own) * kLatentTile);
    }
  }

  // This lane's box of a tile.
  __device__ __forceinline__ PageBox find(const DecodeUnit& unit, int tile) const {
    const int key = tile * kLatentTile + lane_ * p_.box_rows;
    if (lane_ >= p_.boxes || tile >= unit.end || key >= unit.of.length) return {0, -1};
    const int here = key - unit.lag;
    if (p_.pages == nullptr) return {unit.sequence, here};
    return {__ldcg(p_.pages + unit.sequence * p_.table_stride + (here >> p_.page_log)),
            here & ((1 << p_.page_log) - 1)};
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
    const PairTurn turn = PairTurn::of_tile(of_warp(tile));
    const std::uint32_t rank = map_.rank;
    const int keys = left < kLatentTile ? left : kLatentTile;
    const int rows = (keys + p_.box_rows - 1) & -p_.box_rows;  // boxes have a power of two
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
  int each_ = 0;    // sequences of a lane
  int own_ = 0;     // their units
  int before_ = 0;  // units before them
  std::uint32_t notes_ = 0;
  std::uint32_t units_ = 0;  // that have tiles
  std::uint32_t tiles_ = 0;  // of all units so far
};

}  // namespace ringattn::sm90
