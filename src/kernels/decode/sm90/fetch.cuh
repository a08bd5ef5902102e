// SPDX-License-Identifier: Apache-2.0
// The producer warp: looks up pages and issues TMA loads of key tiles, box by box. A box lies in one page. Boxes past a
// sequence's last key are skipped, so neither their data nor their page number is read.
#pragma once

#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode_map.cuh"
#include "kernels/decode/sm90/page_boxes.cuh"
#include "kernels/decode/sm90/work_tiles.cuh"

namespace ringattn::sm90 {

// The operands that a producer warp loads. If two warps share the work, one loads K and the other V.
enum class FetchedParts { kBoth, kKeys, kValues };

template <class C, FetchedParts kParts = FetchedParts::kBoth>
class TileProducer {
 public:
  // `first_column`: of V, where this CTA's columns start.
  __device__ __forceinline__ TileProducer(const DecodeParams& p, const DecodeMap<C>& map, int first_column = 0)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        batch_(32 / p.boxes),
        nth_(lane_ / p.boxes),
        first_column_(first_column) {
    row_ = (lane_ - nth_ * p.boxes) * p.box_rows;
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    process(work_tile, work_tile.begin, work_tile.end, [](int tile) { return tile; });
  }
  // Loads the tiles tile_at(begin) … tile_at(end − 1) of the work tile.
  template <class TileAt>
  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile, int begin, int end, const TileAt& tile_at) {
    const auto find_nth = [&](int nth) { return nth < end ? find(work_tile, tile_at(nth)) : Box{0, -1}; };
    Box ahead = find_nth(begin + nth_);
    for (int first = begin; first < end; first += batch_) {
      const Box box = ahead;
      ahead = find_nth(first + batch_ + nth_);
      const int count = end - first < batch_ ? end - first : batch_;
      for (int i = 0; i < count; ++i, ring_.advance()) {
        const int left = work_tile.seq_info.length - tile_at(first + i) * C::kKeyTile;
        fetch_tile(work_tile.kv_head, box, i, left < C::kKeyTile ? left : C::kKeyTile);
      }
    }
  }

 private:
  using Box = PageBox;

  // This lane's box of a tile, which starts row_ keys after the tile's first.
  __device__ __forceinline__ Box find(const DecodeWorkTile& work_tile, int tile) const {
    if (nth_ >= batch_ || tile * C::kKeyTile + row_ >= work_tile.seq_info.length) return {0, -1};
    const int key =
        tile_in_sequence(p_, work_tile.mask_row, work_tile.seq_info.selected, work_tile.seq_info.gap, tile) *
            C::kKeyTile +
        row_ - work_tile.lag;
    if (p_.pages == nullptr) return {work_tile.sequence, key};
    const int page = __ldcg(p_.pages + work_tile.sequence * p_.table_stride + (key >> p_.page_log));
    return {page, key & ((1 << p_.page_log) - 1)};
  }

  // Loads tile `nth` of the batch that the lanes have looked up. It has `keys` keys.
  __device__ __forceinline__ void fetch_tile(int head, const Box& box, int nth, int keys) const {
    const std::uint32_t stage = ring_.stage();
    const int boxes = keys == C::kKeyTile ? p_.boxes : (keys + p_.box_rows - 1) / p_.box_rows;
    const int rows = boxes * p_.box_rows;
    const int first = nth * p_.boxes;
    const bool elected = elect_one();
    if constexpr (kParts != FetchedParts::kValues) {
      barrier_wait(map_.k_empty(stage), ring_.parity() ^ 1U);
      if (elected) barrier_arrive_expect(map_.k_full(stage), rows * (C::kKBytes / C::kKeyTile));
      tma_load_page_boxes<C::kKeyTile, C::kDim, kPanelRowBytes>(elected, map_.k(stage), &p_.k, map_.k_full(stage),
                                                                boxes, p_.box_rows, box, first, p_.k_box_columns, head);
    }
    if constexpr (kParts != FetchedParts::kKeys) {
      barrier_wait(map_.v_empty(stage), ring_.parity() ^ 1U);
      if (elected) barrier_arrive_expect(map_.v_full(stage), rows * (C::kVBytes / C::kKeyTile));
      tma_load_page_boxes<C::kKeyTile, C::kDimV, kPanelRowBytes>(elected, map_.v(stage), &p_.v, map_.v_full(stage),
                                                                 boxes, p_.box_rows, box, first, p_.v_box_columns, head,
                                                                 first_column_);
    }
  }

  const DecodeParams& p_;
  const DecodeMap<C>& map_;
  const int lane_;
  const int batch_;  // tiles whose boxes the lanes look up at a time
  const int nth_;    // this lane's tile in the batch
  const int first_column_;
  int row_;  // where in its tile this lane's box starts
  PackedPipelineState<C::kStages> ring_;
};

}  // namespace ringattn::sm90
