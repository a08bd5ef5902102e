// SPDX-License-Identifier: Apache-2.0
// The warps of the sliced kernel that fetch: one K of the tiles that its CTA scores, one its CTA's columns of every V.
// The former finds out about units, and tells all other warps.
#pragma once

#include <type_traits>

#include "kernels/sm90/decode/lane_copies.cuh"
#include "kernels/sm90/decode/page_boxes.cuh"
#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

// Where a sequence's tiles lie. Lanes look boxes up, those of several tiles at a time, and well ahead.
template <class C>
class TileBoxes {
 public:
  using Box = PageBox;

  __device__ __forceinline__ explicit TileBoxes(const DecodeParams& p)
      : p_(p), lane_(thread_of_cta() % 32), at_a_time_(p.by_boxes.quotient(32)), nth_(p.by_boxes.quotient(lane_)) {
    row_ = (lane_ - nth_ * p.boxes) * p.box_rows;
  }
  __device__ __forceinline__ void begin(const UnitNote& note) {
    sequence_ = note.get(UnitNote::kSequence);
    pages_ = p_.pages + sequence_ * p_.table_stride;
    length_ = note.get(UnitNote::kLength);
    end_ = note.get(UnitNote::kEnd);
    lag_ = note.get(UnitNote::kLag);
    list_ = note.get(UnitNote::kList);
    listed_ = note.get(UnitNote::kListed);
    gap_ = note.get(UnitNote::kGap);
  }
  __device__ __forceinline__ void begin(const DecodeUnit& unit) {
    sequence_ = unit.sequence;
    pages_ = p_.pages + sequence_ * p_.table_stride;
    length_ = unit.of.length;
    end_ = unit.end;
    lag_ = unit.lag;
    list_ = unit.list;
    listed_ = unit.of.listed;
    gap_ = unit.of.gap;
  }

  // Tiles whose boxes are looked up at a time; which of them has this lane's box.
  __device__ int at_a_time() const { return at_a_time_; }
  __device__ int nth() const { return nth_; }
  // This lane's box of a tile, the one that begins row_ keys behind the tile's first.
  __device__ __forceinline__ Box find(int tile) const {
    if (nth_ >= at_a_time_ || tile >= end_ || tile * C::kKeyTile + row_ >= length_) return {0, -1};
    return place_of_rows(tile, row_);
  }
  // Whether a tile is one box. Then one lane does all there is to do for the tiles of a unit, which is faster.
  __device__ bool alone() const { return p_.boxes == 1; }
  // Whether memory says where a tile lies: a block table, or a list.
  __device__ bool looked_up() const { return p_.pages != nullptr || p_.list_blocks != nullptr; }
  // By the lane that does so, of a tile before the unit's end.
  __device__ __forceinline__ Box find_alone(int tile) const {
    return tile >= end_ ? Box{0, -1} : place_of_rows(tile, 0);
  }
  __device__ __forceinline__ void fetch_keys_alone(const SlicedMap<C>& map, const Lap<C::kKStages>& turn,
                                                   const Box& box, int head) const {
    barrier_wait(map.k_empty(turn.place), turn.parity ^ 1U);
    fetch_alone<C::kDim, kPanelRowBytes>(&p_.k, map.k(turn.place), map.k_full(turn.place), box, head, 0,
                                         p_.k_box_columns);
  }
  __device__ __forceinline__ void fetch_values_alone(const SlicedMap<C>& map, const Lap<C::kVStages>& turn,
                                                     const Box& box, int head, std::uint32_t rank) const {
    barrier_wait(map.v_empty(turn.place), turn.parity ^ 1U);
    fetch_alone<C::kSliceColumns, C::kVRowBytes>(&p_.v_slices, map.v(turn.place), map.v_full(turn.place), box, head,
                                                 static_cast<int>(rank) * C::kSliceColumns, p_.slice_box_columns);
  }
  // The next tile of K, and this CTA's columns of the next tile of V, into the stage whose turn it is.
  __device__ __forceinline__ void fetch_keys(const SlicedMap<C>& map, const Lap<C::kKStages>& turn, int tile, Box box,
                                             int head) const {
    barrier_wait(map.k_empty(turn.place), turn.parity ^ 1U);
    fetch<C::kDim, kPanelRowBytes>(&p_.k, map.k(turn.place), map.k_full(turn.place), tile, box, 0, head, 0,
                                   p_.k_box_columns);
  }
  __device__ __forceinline__ void fetch_values(const SlicedMap<C>& map, const Lap<C::kVStages>& turn, int tile, Box box,
                                               int nth, int head, std::uint32_t rank) const {
    barrier_wait(map.v_empty(turn.place), turn.parity ^ 1U);
    fetch<C::kSliceColumns, C::kVRowBytes>(&p_.v_slices, map.v(turn.place), map.v_full(turn.place), tile, box, nth,
                                           head, static_cast<int>(rank) * C::kSliceColumns, p_.slice_box_columns);
  }

  // Whether lanes copy rows of V. Then they look up pieces, of TilePieces::kTiles tiles at a time: which of these has
  // this lane's; and this lane's of a tile.
  __device__ bool by_lanes() const { return p_.values_by_lanes; }
  __device__ int tile_of_piece() const { return lane_ / TilePieces<C>::kPieces; }
  __device__ __forceinline__ Box find_piece(int tile) const {
    const int row = lane_ % TilePieces<C>::kPieces * kPieceRows;
    if (tile >= end_ || tile * C::kKeyTile + row >= length_) return {0, -1};
    return place_of_rows(tile, row);
  }
  // Where in memory this CTA's columns of a piece begin that has been found; null: nowhere, as of what is in no page of
  // the pool.
  __device__ __forceinline__ const std::byte* piece_at(const Box& piece, int head, std::uint32_t rank) const {
    const bool found =
        piece.row >= 0 && static_cast<std::uint32_t>(piece.page) < static_cast<std::uint32_t>(p_.pool_pages);
    return found ? p_.v_rows.at(piece.page, piece.row, head) + rank * (2 * C::kSliceColumns) : nullptr;
  }
  __device__ __forceinline__ void copy_values(const SlicedMap<C>& map, const Lap<C::kVStages>& turn,
                                              const std::byte* piece, int nth) const {
    copy_by_lanes<C>(static_cast<unsigned>(lane_), piece, p_.v_rows.token_stride, nth, map.v(turn.place),
                     map.v_empty(turn.place), turn.parity ^ 1U, map.v_full(turn.place));
  }

 protected:
  // Fetches the tile whose boxes the lanes of this nth() have found, `columns` at a time from first_column on, into
  // `target`, in rows of kRowBytes. The barrier counts it.
  template <int kColumns, int kRowBytes>
  __device__ __forceinline__ void fetch(const CUtensorMap* map, std::uint32_t target, std::uint32_t barrier, int tile,
                                        const Box& box, int nth, int head, int first_column, int columns) const {
    constexpr int kAllRowBytes = (kColumns * 2 + kRowBytes - 1) / kRowBytes * kRowBytes;  // of all panels
    // No order between the two is needed: the phase waits for this arrival however many bytes have come.
    if (lane_ == 0) barrier_arrive_expect(barrier, rows(tile) * kAllRowBytes);
    if (nth_ != nth || box.row < 0) return;
    const std::uint32_t to = target + static_cast<std::uint32_t>(row_ * kRowBytes);
#pragma unroll 1
    for (int column = 0; column < kColumns; column += columns) {
      load_page_box(to + static_cast<std::uint32_t>(column / kPanelColumns * (C::kKeyTile * kRowBytes)), map, barrier,
                    first_column + column, head, box.page, box.row);
    }
  }

  // The same of a tile that is one box, by one lane.
  template <int kColumns, int kRowBytes>
  __device__ __forceinline__ static void fetch_alone(const CUtensorMap* map, std::uint32_t target,
                                                     std::uint32_t barrier, const Box& box, int head, int first_column,
                                                     int columns) {
    constexpr int kAllRowBytes = (kColumns * 2 + kRowBytes - 1) / kRowBytes * kRowBytes;
    barrier_arrive_expect(barrier, C::kKeyTile * kAllRowBytes);
    if (columns < kColumns) {
      load_columns<C::kKeyTile, kColumns, kRowBytes, true>(target, map, barrier, box, head, first_column);
    } else {
      load_columns<C::kKeyTile, kColumns, kRowBytes, false>(target, map, barrier, box, head, first_column);
    }
  }

  // Where the rows of a tile lie from `row` on, as far as they are of one box.
  __device__ __forceinline__ Box place_of_rows(int tile, int row) const {
    const int here = tile_in_sequence(p_, list_, listed_, gap_, tile) * C::kKeyTile + row - lag_;
    if (p_.pages == nullptr) return {sequence_, here};
    return {__ldcg(pages_ + (here >> p_.page_log)), here & ((1 << p_.page_log) - 1)};
  }

  // Of a tile, those that boxes bring: behind the last key none but the rest of its box.
  __device__ __forceinline__ int rows(int tile) const {
    const int left = length_ - tile * C::kKeyTile;
    if (p_.boxes == 1 || left >= C::kKeyTile) return C::kKeyTile;
    return (left + p_.box_rows - 1) & ~(p_.box_rows - 1);  // where there are several boxes, their rows are 2ⁿ
  }

  const DecodeParams& p_;
  const int lane_;
  const int at_a_time_;
  const int nth_;
  int row_;  // where in its tile this lane's box begins
  const std::int32_t* pages_ = nullptr;
  int sequence_ = 0, length_ = 0, end_ = 0, lag_ = 0;
  int list_ = 0, listed_ = 0, gap_ = 0;
};

template <class C, class Boxes = TileBoxes<C>>
class KeyFetcher {
 public:
  __device__ __forceinline__ KeyFetcher(const DecodeParams& p, const SlicedMap<C>& map, std::uint32_t rank,
                                        const Boxes& boxes)
      : p_(p), map_(map), rank_(rank), lane_(thread_of_cta() % 32), boxes_(boxes) {}

  // Units first, first + step, … What other kernels have written is read, here and by those who are told of units, once
  // they are done.
  __device__ __forceinline__ void run(int first, int step) {
    bring_closer(first);
    await_kernels_before_step(p_);
    int units = kNoKey;  // of one sequence, its first unit here tells
    if (p_.sequences > 1) {
      units = count_units<C>(p_, map_);
    } else {
      if (lane_ == 0) store_number(map_.units_before(0), 0);
      __syncwarp();
    }
#pragma unroll 1
    for (int n = first; n < units; n += step) {
      const DecodeUnit unit = unit_of<C>(p_, map_, n);
      if (p_.sequences == 1) units = unit.of.groups * unit.stride;
      if (n < units) take(unit);
    }
    tell_end();
  }

 private:
  // Fetches what units are found by, and query rows where it's clear whose, to the second level of the caches: whatever
  // is written there later is seen all the same.
  __device__ __forceinline__ void bring_closer(int first) const {
    if (lane_ * 32 < p_.sequences) cuda::prefetch_to_l2(p_.lengths + lane_ * 32);
    if (p_.sequences > 1) return;
    const int stride = unit_stride(p_);
    const int nth = p_.by_stride.quotient(first);
    DecodeUnit unit{};
    unit.kv_head = p_.by_blocks.quotient(first - nth * stride);
    unit.block = first - nth * stride - unit.kv_head * p_.blocks;
    if (p_.pages != nullptr && lane_ == 0) {
      cuda::prefetch_to_l2(p_.pages + (nth * kGroupTiles * C::kKeyTile >> p_.page_log));
    }
    const auto& q = p_.fold.q;
    for (int i = lane_; i < rows_of(p_, unit) * 2; i += 32) {
      const DecodePlace place = place_of(p_, unit, i / 2);
      const auto* const row =
          static_cast<const std::uint16_t*>(q.data) + place.row * q.token_stride + place.query_head * q.head_stride;
      for (int column = i % 2 * 64; column < C::kDim; column += 128) cuda::prefetch_to_l2(row + column);
    }
  }

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const Look look = look_at(unit);
    boxes_.begin(unit);
    bool alone = false;
    if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) alone = boxes_.alone();
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    const auto tile_at = [&](std::uint32_t number) { return unit.begin + static_cast<int>(number - begin); };
    // The reference tile, and then those that this CTA scores: own, own + kSlices, … Where states have the references,
    // the latter alone.
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));
    const int reference = C::kResumes && unit.resumes ? tile_at(own) : look.reference;
    int tile = reference;
    const auto find = [&](int of) { return alone ? boxes_.find_alone(of) : boxes_.find(of); };
    auto ahead = find(tile);
    bool more = tile < unit.end && unit.begin < unit.end;
    const int note_at = more && notes_ == 0 ? 1 : 0;  // everyone waits for the first tile
#pragma unroll 1
    for (int n = 0;; ++n) {
      if (n == note_at) write_note(unit, look);
      if (!more) break;
      const auto box = ahead;
      const int now = tile;
      if (own < tiles_ && tile_at(own) == reference) own += C::kSlices;
      more = own < tiles_;
      tile = tile_at(own);
      own += C::kSlices;
      ahead = find(tile);
      if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) {
        if (alone) {
          if (one_of_warp()) boxes_.fetch_keys_alone(map_, stage_, box, unit.kv_head);
          __syncwarp();
        }
      }
      if (!alone) boxes_.fetch_keys(map_, stage_, now, box, unit.kv_head);
      stage_.advance();
    }
  }

  // What there is to know of a unit's rows: this lane's, and of all of them. The reference tile is the first in which a
  // row that folds the unit sees a key. Rows for which it is another one make the unit fail.
  struct Look {
    RowReach reach;
    int rows, reference;
    bool fails;
    int common_begin, common_end;
  };
  __device__ __forceinline__ Look look_at(const DecodeUnit& unit) const {
    const int rows = rows_of(p_, unit);
    RowReach reach{kNoKey, 0, unit.end, unit.end};
    if (lane_ < rows) reach = reach_of<C>(p_, unit, place_of(p_, unit, lane_));
    const bool folds = reach.begin < reach.end;
    int own = reach.low / C::kKeyTile;
    own = own > unit.begin ? own : unit.begin;
    const std::uint32_t folding = __ballot_sync(0xffffffffU, folds);
    const int first = __shfl_sync(0xffffffffU, own, folding == 0 ? 0 : __ffs(static_cast<int>(folding)) - 1);
    const bool inside = folding != 0 && first < unit.end;
    const int reference = inside ? first : unit.begin;
    const bool fails = __any_sync(0xffffffffU, folds && own != reference);
    const int common_begin = __reduce_max_sync(0xffffffffU, lane_ < rows ? reach.low : 0);
    const int common_end = __reduce_min_sync(0xffffffffU, lane_ < rows ? reach.high : kNoKey);
    return {reach, rows, reference, fails, common_begin, common_end};
  }

  __device__ __forceinline__ void write_note(const DecodeUnit& unit, const Look& look) {
    const Turn<2> turn(notes_++);
    const UnitNote note = map_.note(turn.place);
    barrier_wait(map_.note_empty(turn.place), turn.parity ^ 1U);
    const auto put = [&note](UnitNote::Field field, int number) { store_number(note.at(field), number); };
    if (lane_ < kSlicedRows) {
      store_number(note.at(UnitNote::kLow, lane_), look.reach.low);
      store_number(note.at(UnitNote::kHigh, lane_), look.reach.high);
      store_number(note.at(UnitNote::kRowBegin, lane_), look.reach.begin);
      store_number(note.at(UnitNote::kRowEnd, lane_), look.reach.end);
    }
    if (lane_ == 0) {
      put(UnitNote::kBegin, unit.begin);
      put(UnitNote::kEnd, unit.end);
      put(UnitNote::kLength, unit.of.length);
      put(UnitNote::kPosition, unit.of.position);
      put(UnitNote::kBeginGroup, unit.of.begin_group);
      put(UnitNote::kGroups, unit.of.groups);
      put(UnitNote::kSequence, unit.sequence);
      put(UnitNote::kKvHead, unit.kv_head);
      put(UnitNote::kBlock, unit.block);
      put(UnitNote::kNumber, unit.number);
      put(UnitNote::kCacheGroup, unit.cache_group);
      put(UnitNote::kLag, unit.lag);
      put(UnitNote::kList, unit.list);
      put(UnitNote::kListed, unit.of.listed);
      put(UnitNote::kGap, unit.of.gap);
      put(UnitNote::kFirstNumber, unit.first_number);
      put(UnitNote::kRows, look.rows);
      put(UnitNote::kReference, look.reference);
      put(UnitNote::kFails, look.fails ? 1 : 0);
      put(UnitNote::kCommonBegin, look.common_begin);
      put(UnitNote::kCommonEnd, look.common_end);
      put(UnitNote::kResumes, unit.resumes ? 1 : 0);
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.note_full(turn.place));
  }

  // There are no more units.
  __device__ __forceinline__ void tell_end() {
    const Turn<2> turn(notes_++);
    barrier_wait(map_.note_empty(turn.place), turn.parity ^ 1U);
    if (lane_ != 0) return;
    store_number(map_.note(turn.place).at(UnitNote::kBegin), UnitNote::kNoMore);
    barrier_arrive(map_.note_full(turn.place));
  }

  const DecodeParams& p_;
  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  const int lane_;
  Boxes boxes_;
  std::uint32_t notes_ = 0;  // so far
  std::uint32_t tiles_ = 0;  // of all units
  Lap<C::kKStages> stage_;   // of the next K that this warp fetches
};

template <class C, class Boxes = TileBoxes<C>>
class ValueFetcher {
 public:
  __device__ __forceinline__ ValueFetcher(const SlicedMap<C>& map, std::uint32_t rank, const Boxes& boxes)
      : map_(map), rank_(rank), boxes_(boxes) {}

  __device__ __forceinline__ void take(const UnitNote& note) {
    const int end = note.get(UnitNote::kEnd);
    const int kv_head = note.get(UnitNote::kKvHead);
    int tile = note.get(UnitNote::kBegin);
    boxes_.begin(note);
    if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) {
      if (boxes_.alone()) {
        if (boxes_.looked_up()) {
          take_alone<4>(tile, end, kv_head);  // what memory says takes longer to come than a tile to be folded
        } else {
          take_alone<1>(tile, end, kv_head);
        }
        return;
      }
      if (boxes_.by_lanes()) {
        take_pieces(tile, end, kv_head);
        return;
      }
    }
    auto ahead = boxes_.find(tile + boxes_.nth());
#pragma unroll 1
    while (tile < end) {
      const auto box = ahead;
      ahead = boxes_.find(tile + boxes_.at_a_time() + boxes_.nth());
#pragma unroll 1
      for (int nth = 0; nth < boxes_.at_a_time() && tile < end; ++nth, ++tile) {
        boxes_.fetch_values(map_, stage_, tile, box, nth, kv_head, rank_);
        stage_.advance();
      }
    }
  }

 private:
  // Tiles are found so many ahead of their copies.
  template <int kAhead>
  __device__ __forceinline__ void take_alone(int tile, int end, int head) {
    if (one_of_warp()) {  // always the same lane, whose stage is the one that counts
      typename Boxes::Box ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[i] = boxes_.find_alone(tile + i);
#pragma unroll 1
      for (; tile < end; tile += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (tile + i >= end) break;
          const auto box = ahead[i];
          ahead[i] = boxes_.find_alone(tile + i + kAhead);
          boxes_.fetch_values_alone(map_, stage_, box, head, rank_);
          stage_.advance();
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void take_pieces(int tile, int end, int head) {
    auto ahead = boxes_.find_piece(tile + boxes_.tile_of_piece());
#pragma unroll 1
    while (tile < end) {
      const std::byte* const piece = boxes_.piece_at(ahead, head, rank_);
      ahead = boxes_.find_piece(tile + TilePieces<C>::kTiles + boxes_.tile_of_piece());
#pragma unroll 1
      for (int nth = 0; nth < TilePieces<C>::kTiles && tile < end; ++nth, ++tile) {
        boxes_.copy_values(map_, stage_, piece, nth);
        stage_.advance();
      }
    }
  }

  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  Boxes boxes_;
  Lap<C::kVStages> stage_;
};

}  // namespace ringattn::sm90
