// SPDX-License-Identifier: Apache-2.0
// The producer warps of the sliced kernel: one loads K of the tiles that its CTA scores, one its CTA's columns of every
// V tile. The K producer also posts the WorkTileInfos to all other warps.
#pragma once

#include <type_traits>

#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/lane_copies.cuh"
#include "kernels/decode/sm90/page_boxes.cuh"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

// Locates a sequence's tiles. Lanes look up the boxes of several tiles at a time, well ahead of the loads.
template <class C>
class TileBoxes {
 public:
  using Box = PageBox;

  __device__ __forceinline__ explicit TileBoxes(const DecodeParams& p)
      : p_(p), lane_(thread_of_cta() % 32), at_a_time_(p.by_boxes.quotient(32)), nth_(p.by_boxes.quotient(lane_)) {
    row_ = (lane_ - nth_ * p.boxes) * p.box_rows;
  }
  __device__ __forceinline__ void begin(const WorkTileInfo& info) {
    sequence_ = info.get(WorkTileInfo::kSequence);
    pages_ = p_.pages + sequence_ * p_.table_stride;
    length_ = info.get(WorkTileInfo::kLength);
    end_ = info.get(WorkTileInfo::kEnd);
    lag_ = info.get(WorkTileInfo::kLag);
    mask_row_ = info.get(WorkTileInfo::kMaskRow);
    selected_ = info.get(WorkTileInfo::kSelected);
    gap_ = info.get(WorkTileInfo::kGap);
  }
  __device__ __forceinline__ void begin(const DecodeWorkTile& work_tile) {
    sequence_ = work_tile.sequence;
    pages_ = p_.pages + sequence_ * p_.table_stride;
    length_ = work_tile.seq_info.length;
    end_ = work_tile.end;
    lag_ = work_tile.lag;
    mask_row_ = work_tile.mask_row;
    selected_ = work_tile.seq_info.selected;
    gap_ = work_tile.seq_info.gap;
  }

  // Tiles whose boxes are looked up at a time, and this lane's tile among them.
  __device__ int at_a_time() const { return at_a_time_; }
  __device__ int nth() const { return nth_; }
  // This lane's box of a tile, which starts row_ keys after the tile's first.
  __device__ __forceinline__ Box find(int tile) const {
    if (nth_ >= at_a_time_ || tile >= end_ || tile * C::kKeyTile + row_ >= length_) return {0, -1};
    return locate_rows(tile, row_);
  }
  // Whether a tile is one box. Then one lane does everything for the tiles of a work tile, which is faster.
  __device__ bool single_box() const { return p_.boxes == 1; }
  // Whether a tile's location must be read from memory: a block table or a block mask.
  __device__ bool needs_lookup() const { return p_.pages != nullptr || p_.mask_block_indices != nullptr; }
  // For that one lane, the box of a tile.
  __device__ __forceinline__ Box find_single(int tile) const {
    return tile >= end_ ? Box{0, -1} : locate_rows(tile, 0);
  }
  __device__ __forceinline__ void load_single_keys(const ColumnSliceMap<C>& map, const PipelineState<C::kKStages>& turn,
                                                   const Box& box, int head) const {
    barrier_wait(map.k_empty(turn.index), turn.parity ^ 1U);
    load_single<C::kDim, kPanelRowBytes>(&p_.k, map.k(turn.index), map.k_full(turn.index), box, head, 0,
                                         p_.k_box_columns);
  }
  __device__ __forceinline__ void load_single_values(const ColumnSliceMap<C>& map,
                                                     const PipelineState<C::kVStages>& turn, const Box& box, int head,
                                                     std::uint32_t rank) const {
    barrier_wait(map.v_empty(turn.index), turn.parity ^ 1U);
    load_single<C::kSliceColumns, C::kVRowBytes>(&p_.v_slices, map.v(turn.index), map.v_full(turn.index), box, head,
                                                 static_cast<int>(rank) * C::kSliceColumns, p_.slice_box_columns);
  }
  // Waits for the stage to be empty, then loads the next K tile, or this CTA's columns of the next V tile.
  __device__ __forceinline__ void fetch_keys(const ColumnSliceMap<C>& map, const PipelineState<C::kKStages>& turn,
                                             int tile, Box box, int head) const {
    barrier_wait(map.k_empty(turn.index), turn.parity ^ 1U);
    fetch<C::kDim, kPanelRowBytes>(&p_.k, map.k(turn.index), map.k_full(turn.index), tile, box, 0, head, 0,
                                   p_.k_box_columns);
  }
  __device__ __forceinline__ void fetch_values(const ColumnSliceMap<C>& map, const PipelineState<C::kVStages>& turn,
                                               int tile, Box box, int nth, int head, std::uint32_t rank) const {
    barrier_wait(map.v_empty(turn.index), turn.parity ^ 1U);
    fetch<C::kSliceColumns, C::kVRowBytes>(&p_.v_slices, map.v(turn.index), map.v_full(turn.index), tile, box, nth,
                                           head, static_cast<int>(rank) * C::kSliceColumns, p_.slice_box_columns);
  }

  // Whether lanes copy rows of V. Then they look up page runs of TilePageRuns::kTiles tiles at a time: this lane's tile
  // among them, and its page run of a tile.
  __device__ bool by_lanes() const { return p_.values_by_lanes; }
  __device__ int tile_of_page_run() const { return lane_ / TilePageRuns<C>::kPageRuns; }
  __device__ __forceinline__ Box find_page_run(int tile) const {
    const int row = lane_ % TilePageRuns<C>::kPageRuns * kPageRunRows;
    if (tile >= end_ || tile * C::kKeyTile + row >= length_) return {0, -1};
    return locate_rows(tile, row);
  }
  // The address of this CTA's columns of a page run that has been looked up; null if it is in no page of the pool.
  __device__ __forceinline__ const std::byte* page_run_at(const Box& page_run, int head, std::uint32_t rank) const {
    const bool found =
        page_run.row >= 0 && static_cast<std::uint32_t>(page_run.page) < static_cast<std::uint32_t>(p_.pool_pages);
    return found ? p_.v_rows.at(page_run.page, page_run.row, head) + rank * (2 * C::kSliceColumns) : nullptr;
  }
  __device__ __forceinline__ void copy_values(const ColumnSliceMap<C>& map, const PipelineState<C::kVStages>& turn,
                                              const std::byte* page_run, int nth) const {
    copy_by_lanes<C>(static_cast<unsigned>(lane_), page_run, p_.v_rows.token_stride, nth, map.v(turn.index),
                     map.v_empty(turn.index), turn.parity ^ 1U, map.v_full(turn.index));
  }

 protected:
  // Loads tile `tile` from the boxes that the lanes with this nth() have looked up, `columns` at a time from
  // first_column on, into `target`, in rows of kRowBytes, and signals the barrier.
  template <int kColumns, int kRowBytes>
  __device__ __forceinline__ void fetch(const CUtensorMap* map, std::uint32_t target, std::uint32_t barrier, int tile,
                                        const Box& box, int nth, int head, int first_column, int columns) const {
    // bytes of a tile row in all panels
    constexpr int kAllRowBytes = (kColumns * 2 + kRowBytes - 1) / kRowBytes * kRowBytes;
    // Other lanes' loads may come first: the phase waits for this arrival however many bytes have landed.
    if (lane_ == 0) barrier_arrive_expect(barrier, rows(tile) * kAllRowBytes);
    if (nth_ != nth || box.row < 0) return;
    const std::uint32_t to = target + static_cast<std::uint32_t>(row_ * kRowBytes);
#pragma unroll 1
    for (int column = 0; column < kColumns; column += columns) {
      tma_load_page_box(to + static_cast<std::uint32_t>(column / kPanelColumns * (C::kKeyTile * kRowBytes)), map,
                        barrier, first_column + column, head, box.page, box.row);
    }
  }

  // The same by one lane, for a tile that is one box.
  template <int kColumns, int kRowBytes>
  __device__ __forceinline__ static void load_single(const CUtensorMap* map, std::uint32_t target,
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

  // Locates the rows of a tile from `row` on, as far as they lie in one box.
  __device__ __forceinline__ Box locate_rows(int tile, int row) const {
    const int here = tile_in_sequence(p_, mask_row_, selected_, gap_, tile) * C::kKeyTile + row - lag_;
    if (p_.pages == nullptr) return {sequence_, here};
    return {__ldcg(pages_ + (here >> p_.page_log)), here & ((1 << p_.page_log) - 1)};
  }

  // Rows of a tile that its boxes load: after the last key, only the rest of its box.
  __device__ __forceinline__ int rows(int tile) const {
    const int left = length_ - tile * C::kKeyTile;
    if (p_.boxes == 1 || left >= C::kKeyTile) return C::kKeyTile;
    return (left + p_.box_rows - 1) & ~(p_.box_rows - 1);  // with several boxes the rows of a box are a power of 2
  }

  const DecodeParams& p_;
  const int lane_;
  const int at_a_time_;
  const int nth_;
  int row_;  // where in its tile this lane's box starts
  const std::int32_t* pages_ = nullptr;
  int sequence_ = 0, length_ = 0, end_ = 0, lag_ = 0;
  int mask_row_ = 0, selected_ = 0, gap_ = 0;
};

template <class C, class Boxes = TileBoxes<C>>
class KeyProducer {
 public:
  __device__ __forceinline__ KeyProducer(const DecodeParams& p, const ColumnSliceMap<C>& map, std::uint32_t rank,
                                         const Boxes& boxes)
      : p_(p), map_(map), rank_(rank), lane_(thread_of_cta() % 32), boxes_(boxes) {}

  // Posts and loads the work tiles first, first + step, … Data written by earlier kernels is read, here and by the
  // warps that get infos, only after those kernels are complete.
  __device__ __forceinline__ void run(int first, int step) {
    prefetch_metadata(first);
    pdl_wait_before_step(p_);
    int work_tiles = kNoKey;  // unknown; with one sequence, its first work tile here tells
    if (p_.sequences > 1) {
      work_tiles = count_work_tiles<C>(p_, map_);
    } else {
      if (lane_ == 0) store_number(map_.work_tiles_before(0), 0);
      __syncwarp();
    }
#pragma unroll 1
    for (int n = first; n < work_tiles; n += step) {
      const DecodeWorkTile work_tile = work_tile_of<C>(p_, map_, n);
      if (p_.sequences == 1) work_tiles = work_tile.seq_info.splits * work_tile.stride;
      if (n < work_tiles) process(work_tile);
    }
    arrive_end();
  }

 private:
  // Prefetches the lengths and block table into L2, and the query rows if they are known. Data written later is seen
  // all the same.
  __device__ __forceinline__ void prefetch_metadata(int first) const {
    if (lane_ * 32 < p_.sequences) cuda::prefetch_to_l2(p_.lengths + lane_ * 32);
    if (p_.sequences > 1) return;
    const int stride = work_tile_stride(p_);
    const int nth = p_.by_stride.quotient(first);
    DecodeWorkTile work_tile{};
    work_tile.kv_head = p_.by_blocks.quotient(first - nth * stride);
    work_tile.block = first - nth * stride - work_tile.kv_head * p_.blocks;
    if (p_.pages != nullptr && lane_ == 0) {
      cuda::prefetch_to_l2(p_.pages + (nth * kTilesPerKvSplit * C::kKeyTile >> p_.page_log));
    }
    const auto& q = p_.attention.q;
    for (int i = lane_; i < rows_of(p_, work_tile) * 2; i += 32) {
      const DecodeCoord coord = coord_of(p_, work_tile, i / 2);
      const auto* const row =
          static_cast<const std::uint16_t*>(q.data) + coord.row * q.token_stride + coord.query_head * q.head_stride;
      for (int column = i % 2 * 64; column < C::kDim; column += 128) cuda::prefetch_to_l2(row + column);
    }
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const RowSummary summary = summarize_rows(work_tile);
    boxes_.begin(work_tile);
    bool single_box = false;
    if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) single_box = boxes_.single_box();
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    const auto tile_at = [&](std::uint32_t number) { return work_tile.begin + static_cast<int>(number - begin); };
    // The softmax_offset tile first, then the tiles that this CTA scores: own, own + kSlices, … If offsets come from
    // states, only the latter.
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));
    const int softmax_offset = C::kResumes && work_tile.resumes ? tile_at(own) : summary.softmax_offset;
    int tile = softmax_offset;
    const auto find = [&](int of) { return single_box ? boxes_.find_single(of) : boxes_.find(of); };
    auto ahead = find(tile);
    bool more = tile < work_tile.end && work_tile.begin < work_tile.end;
    const int info_at = more && infos_ == 0 ? 1 : 0;  // the first tile is urgent, the info less so
#pragma unroll 1
    for (int n = 0;; ++n) {
      if (n == info_at) write_info(work_tile, summary);
      if (!more) break;
      const auto box = ahead;
      const int now = tile;
      if (own < tiles_ && tile_at(own) == softmax_offset) own += C::kSlices;
      more = own < tiles_;
      tile = tile_at(own);
      own += C::kSlices;
      ahead = find(tile);
      if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) {
        if (single_box) {
          if (elect_one()) boxes_.load_single_keys(map_, stage_, box, work_tile.kv_head);
          __syncwarp();
        }
      }
      if (!single_box) boxes_.fetch_keys(map_, stage_, now, box, work_tile.kv_head);
      stage_.advance();
    }
  }

  // The rows of a work tile: this lane's range, and properties of all. The softmax_offset tile is the first one in
  // which a row with tiles here sees a key. If it differs between rows, the work tile fails.
  struct RowSummary {
    RowRange row_range;
    int rows, softmax_offset;
    bool fails;
    int common_begin, common_end;
  };
  __device__ __forceinline__ RowSummary summarize_rows(const DecodeWorkTile& work_tile) const {
    const int rows = rows_of(p_, work_tile);
    RowRange row_range{kNoKey, 0, work_tile.end, work_tile.end};
    if (lane_ < rows) row_range = range_of<C>(p_, work_tile, coord_of(p_, work_tile, lane_));
    const bool attends = row_range.begin < row_range.end;
    int own = row_range.low / C::kKeyTile;
    own = own > work_tile.begin ? own : work_tile.begin;
    const std::uint32_t attending = __ballot_sync(0xffffffffU, attends);
    const int first = __shfl_sync(0xffffffffU, own, attending == 0 ? 0 : __ffs(static_cast<int>(attending)) - 1);
    const bool inside = attending != 0 && first < work_tile.end;
    const int softmax_offset = inside ? first : work_tile.begin;
    const bool fails = __any_sync(0xffffffffU, attends && own != softmax_offset);
    const int common_begin = __reduce_max_sync(0xffffffffU, lane_ < rows ? row_range.low : 0);
    const int common_end = __reduce_min_sync(0xffffffffU, lane_ < rows ? row_range.high : kNoKey);
    return {row_range, rows, softmax_offset, fails, common_begin, common_end};
  }

  __device__ __forceinline__ void write_info(const DecodeWorkTile& work_tile, const RowSummary& summary) {
    const PipelineStateAt<2> turn(infos_++);
    const WorkTileInfo info = map_.info(turn.index);
    barrier_wait(map_.info_empty(turn.index), turn.parity ^ 1U);
    const auto put = [&info](WorkTileInfo::Field field, int number) { store_number(info.at(field), number); };
    if (lane_ < kColumnSliceRows) {
      store_number(info.at(WorkTileInfo::kLow, lane_), summary.row_range.low);
      store_number(info.at(WorkTileInfo::kHigh, lane_), summary.row_range.high);
      store_number(info.at(WorkTileInfo::kRowBegin, lane_), summary.row_range.begin);
      store_number(info.at(WorkTileInfo::kRowEnd, lane_), summary.row_range.end);
    }
    if (lane_ == 0) {
      put(WorkTileInfo::kBegin, work_tile.begin);
      put(WorkTileInfo::kEnd, work_tile.end);
      put(WorkTileInfo::kLength, work_tile.seq_info.length);
      put(WorkTileInfo::kPosition, work_tile.seq_info.position);
      put(WorkTileInfo::kBeginSplit, work_tile.seq_info.begin_split);
      put(WorkTileInfo::kSplits, work_tile.seq_info.splits);
      put(WorkTileInfo::kSequence, work_tile.sequence);
      put(WorkTileInfo::kKvHead, work_tile.kv_head);
      put(WorkTileInfo::kBlock, work_tile.block);
      put(WorkTileInfo::kNumber, work_tile.number);
      put(WorkTileInfo::kCacheSplit, work_tile.cache_split);
      put(WorkTileInfo::kLag, work_tile.lag);
      put(WorkTileInfo::kMaskRow, work_tile.mask_row);
      put(WorkTileInfo::kSelected, work_tile.seq_info.selected);
      put(WorkTileInfo::kGap, work_tile.seq_info.gap);
      put(WorkTileInfo::kFirstNumber, work_tile.first_number);
      put(WorkTileInfo::kRows, summary.rows);
      put(WorkTileInfo::kOffsetTile, summary.softmax_offset);
      put(WorkTileInfo::kFails, summary.fails ? 1 : 0);
      put(WorkTileInfo::kCommonBegin, summary.common_begin);
      put(WorkTileInfo::kCommonEnd, summary.common_end);
      put(WorkTileInfo::kResumes, work_tile.resumes ? 1 : 0);
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.info_full(turn.index));
  }

  // Posts that there are no more work tiles.
  __device__ __forceinline__ void arrive_end() {
    const PipelineStateAt<2> turn(infos_++);
    barrier_wait(map_.info_empty(turn.index), turn.parity ^ 1U);
    if (lane_ != 0) return;
    store_number(map_.info(turn.index).at(WorkTileInfo::kBegin), WorkTileInfo::kNoMore);
    barrier_arrive(map_.info_full(turn.index));
  }

  const DecodeParams& p_;
  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  const int lane_;
  Boxes boxes_;
  std::uint32_t infos_ = 0;           // posted so far
  std::uint32_t tiles_ = 0;           // tiles of all work tiles so far
  PipelineState<C::kKStages> stage_;  // the next K stage that this warp fills
};

template <class C, class Boxes = TileBoxes<C>>
class ValueProducer {
 public:
  __device__ __forceinline__ ValueProducer(const ColumnSliceMap<C>& map, std::uint32_t rank, const Boxes& boxes)
      : map_(map), rank_(rank), boxes_(boxes) {}

  __device__ __forceinline__ void process(const WorkTileInfo& info) {
    const int end = info.get(WorkTileInfo::kEnd);
    const int kv_head = info.get(WorkTileInfo::kKvHead);
    int tile = info.get(WorkTileInfo::kBegin);
    boxes_.begin(info);
    if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) {
      if (boxes_.single_box()) {
        if (boxes_.needs_lookup()) {
          load_single_boxes<4>(tile, end, kv_head);  // a lookup in memory takes longer than the computation of a tile
        } else {
          load_single_boxes<1>(tile, end, kv_head);
        }
        return;
      }
      if (boxes_.by_lanes()) {
        load_page_runs(tile, end, kv_head);
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
  // Tiles are looked up kAhead tiles before their load.
  template <int kAhead>
  __device__ __forceinline__ void load_single_boxes(int tile, int end, int head) {
    if (elect_one()) {  // always the same lane, whose stage_ is the valid one
      typename Boxes::Box ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[i] = boxes_.find_single(tile + i);
#pragma unroll 1
      for (; tile < end; tile += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (tile + i >= end) break;
          const auto box = ahead[i];
          ahead[i] = boxes_.find_single(tile + i + kAhead);
          boxes_.load_single_values(map_, stage_, box, head, rank_);
          stage_.advance();
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_page_runs(int tile, int end, int head) {
    auto ahead = boxes_.find_page_run(tile + boxes_.tile_of_page_run());
#pragma unroll 1
    while (tile < end) {
      const std::byte* const page_run = boxes_.page_run_at(ahead, head, rank_);
      ahead = boxes_.find_page_run(tile + TilePageRuns<C>::kTiles + boxes_.tile_of_page_run());
#pragma unroll 1
      for (int nth = 0; nth < TilePageRuns<C>::kTiles && tile < end; ++nth, ++tile) {
        boxes_.copy_values(map_, stage_, page_run, nth);
        stage_.advance();
      }
    }
  }

  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  Boxes boxes_;
  PipelineState<C::kVStages> stage_;
};

}  // namespace ringattn::sm90
