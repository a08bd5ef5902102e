// SPDX-License-Identifier: Apache-2.0
// The Hopper decode kernel, bitwise identical to prefill. A CTA takes work tiles, each one KV split of a sequence for a
// row block of one KV head (decode_common.cuh). One producer warp loads, a consumer warpgroup computes (Decoder), and
// the last work tile of a row block merges all partials (decode_common.cuh).
#pragma once

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

// Shared memory of a decode CTA: layout, writers and readers.
//
//   Q          [64 rows]                written and read by the consumer warpgroup
//   K, V       [stages][key_tile rows]  written by TMA, which the producer warp issues; read by the consumers
//   barriers
//   work_tiles [sequences + 1]          how many work tiles come before each sequence (decode_common.cuh)
//
// Tiles are in panels, as in prefill.

// Start of a CTA's shared memory. In a cluster the address also names the CTA: otherwise copies and arrivals would go
// to the first CTA.
template <class C>
__device__ __forceinline__ std::uint32_t shared_base() {
  if constexpr (C::kSlices > 1) return map_to_cta(kReservedBytes, rank_in_cluster());
  return kReservedBytes;
}

template <class C>
struct DecodeMap {
  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = C::kQCapacity;
  static constexpr int kVOffset = kKOffset + C::kStages * C::kKBytes;
  static constexpr int kBarrierOffset = kVOffset + C::kStages * C::kVBytes;
  static constexpr int kWorkTileOffset = kBarrierOffset + 4 * C::kStages * kBarrierBytes;
  static constexpr int kBytes = kWorkTileOffset + (kMaxDecodeSequences + 1) * 4;
  static_assert(C::kStages >= 2 && kBytes <= kMaxSharedBytes);

  __device__ std::uint32_t q() const { return at(kQOffset, 0, 0); }
  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }
  __device__ std::uint32_t work_tiles_before(int sequence) const {
    return at(kWorkTileOffset, static_cast<std::uint32_t>(sequence), 4);
  }
  // Barriers of a K/V stage: full (TMA landed) and empty (every consumer warp has released it).
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(C::kStages + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(2 * C::kStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return k_full(3 * C::kStages + stage); }

 private:
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return shared_base<C>() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// One thread calls it.
template <class C>
__device__ __forceinline__ void init_decode_barriers(const DecodeMap<C>& map) {
  for (std::uint32_t i = 0; i < C::kStages; ++i) {
    barrier_init(map.k_full(i), 1);
    barrier_init(map.v_full(i), 1);
    barrier_init(map.k_empty(i), kDecodeConsumerThreads / 32);
    barrier_init(map.v_empty(i), kDecodeConsumerThreads / 32);
  }
  barrier_init_fence();
}

// TMA loads of a tile from boxes that lie in one page each. One elected lane issues all of them, so that the compiler
// knows that TMA operands in uniform registers are one lane's, and makes no loop over lanes.

struct PageBox {
  int page;
  int row;  // row in the page; −1: the box is past the end of the sequence
};

// One lane calls it: loads a box into `target`, in panels of kTileRows rows of kRowBytes. One copy loads all kColumns,
// or one panel (kByPanel).
template <int kTileRows, int kColumns, int kRowBytes, bool kByPanel>
__device__ __forceinline__ void load_columns(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                             const PageBox& box, int head, int first_column) {
  constexpr int kColumnsOfCopy = kByPanel ? kPanelColumns : kColumns;
#pragma unroll
  for (int column = 0; column < kColumns; column += kColumnsOfCopy) {
    tma_load_page_box(target + static_cast<std::uint32_t>(column / kPanelColumns * kTileRows * kRowBytes), map, barrier,
                      first_column + column, head, box.page, box.row);
  }
}

// A warp with one elected lane calls it: loads the first `count` boxes of a tile, which lanes `first`, first + 1, …
// have looked up, from column `first_column` on. If a tile is one box, a copy loads `columns`; else the rows of the
// boxes follow each other in `target`.
template <int kTileRows, int kColumns, int kRowBytes>
__device__ __forceinline__ void tma_load_page_boxes(bool elected, std::uint32_t target, const CUtensorMap* map,
                                                    std::uint32_t barrier, int count, int box_rows, const PageBox& box,
                                                    int first, int columns, int head, int first_column = 0) {
  const auto box_of = [&box](int lane) {
    return PageBox{__shfl_sync(0xffffffffU, box.page, lane), __shfl_sync(0xffffffffU, box.row, lane)};
  };
  if (box_rows == kTileRows) {
    const PageBox whole = box_of(first);
    if (!elected) return;
    if (columns < kColumns) {
      load_columns<kTileRows, kColumns, kRowBytes, true>(target, map, barrier, whole, head, first_column);
    } else {
      load_columns<kTileRows, kColumns, kRowBytes, false>(target, map, barrier, whole, head, first_column);
    }
    return;
  }
  const auto box_bytes = static_cast<std::uint32_t>(box_rows * kRowBytes);
#pragma unroll 2
  for (int i = 0; i < count; ++i, target += box_bytes) {
    const PageBox part = box_of(first + i);
    if (elected) load_columns<kTileRows, kColumns, kRowBytes, true>(target, map, barrier, part, head, first_column);
  }
}

// The producer warp: looks up pages and issues TMA loads of key tiles, box by box. A box lies in one page. Boxes past a
// sequence's last key are skipped, so neither their data nor their page number is read.

// The operands that a producer warp loads. If two warps share the work, one loads K and the other V.
enum class FetchedParts { kBoth, kKeys, kValues };

template <class C, FetchedParts kParts = FetchedParts::kBoth>
class TileProducer {
 public:
  // `first_column`: of V, where this CTA's columns start.
  __device__ __forceinline__ TileProducer(const typename C::Params& p, const DecodeMap<C>& map, int first_column = 0)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        batch_(32 / p.boxes.per_tile),
        nth_(lane_ / p.boxes.per_tile),
        first_column_(first_column) {
    row_ = (lane_ - nth_ * p.boxes.per_tile) * p.boxes.rows;
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
    const int in_sequence =
        tile_in_sequence(p_, work_tile.mask_row, work_tile.seq_info.selected, work_tile.seq_info.gap, tile);
    const int key = (in_sequence * C::kKeyTile - work_tile.lag) + row_;
    if (p_.table.pages == nullptr) return {work_tile.sequence, key};
    const int page = __ldcg(p_.table.pages + work_tile.sequence * p_.table.stride + (key >> p_.table.page_log));
    return {page, key & ((1 << p_.table.page_log) - 1)};
  }

  // Loads tile `nth` of the batch that the lanes have looked up. It has `keys` keys.
  __device__ __forceinline__ void fetch_tile(int head, const Box& box, int nth, int keys) const {
    const std::uint32_t stage = ring_.stage();
    const int boxes = keys == C::kKeyTile ? p_.boxes.per_tile : (keys + p_.boxes.rows - 1) / p_.boxes.rows;
    const int rows = boxes * p_.boxes.rows;
    const int first = nth * p_.boxes.per_tile;
    const bool elected = elect_one();
    if constexpr (kParts != FetchedParts::kValues) {
      barrier_wait(map_.k_empty(stage), ring_.parity() ^ 1U);
      if (elected) barrier_arrive_expect(map_.k_full(stage), rows * (C::kKBytes / C::kKeyTile));
      tma_load_page_boxes<C::kKeyTile, C::kDim, kPanelRowBytes>(elected, map_.k(stage), &p_.cache.k, map_.k_full(stage),
                                                                boxes, p_.boxes.rows, box, first, p_.cache.k_columns,
                                                                head);
    }
    if constexpr (kParts != FetchedParts::kKeys) {
      barrier_wait(map_.v_empty(stage), ring_.parity() ^ 1U);
      if (elected) barrier_arrive_expect(map_.v_full(stage), rows * (C::kVBytes / C::kKeyTile));
      tma_load_page_boxes<C::kKeyTile, C::kDimV, kPanelRowBytes>(elected, map_.v(stage), &p_.cache.v,
                                                                 map_.v_full(stage), boxes, p_.boxes.rows, box, first,
                                                                 p_.cache.v_columns, head, first_column_);
    }
  }

  const typename C::Params& p_;
  const DecodeMap<C>& map_;
  const int lane_;
  const int batch_;  // tiles whose boxes the lanes look up at a time
  const int nth_;    // this lane's tile in the batch
  const int first_column_;
  int row_;  // where in its tile this lane's box starts
  PackedPipelineState<C::kStages> ring_;
};

// Copies the query rows of a work tile from global to shared memory, in the layout of the consumer's wgmma.

// The consumer warpgroup calls it. coord_of_row(i) is the coordinate of row i of `rows`. Missing rows, and columns
// past head_dim, become zeros.
template <class C, class Map, class CoordOfRow>
__device__ __forceinline__ void load_queries(const cuda::AttentionParams& p, const Map& map, int rows,
                                             CoordOfRow coord_of_row) {
  constexpr int kChunks = C::kQBytes / kQueryTile / 16;
  const auto* const q = static_cast<const std::uint16_t*>(p.q.data);
  const bool aligned =
      ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p.q.token_stride | p.q.head_stride))) &
       15U) == 0;
  // From here on no thread reads the previous work tile's rows.
  named_sync(kDecodeBarrier, kDecodeConsumerThreads);
  // A rolled loop, since it runs once. Its copies are in flight together.
#pragma unroll 1
  for (int i = thread_of_cta(); i < kQueryTile * kChunks; i += kDecodeConsumerThreads) {
    const int tile_row = i / kChunks;
    const int chunk = i % kChunks;
    const bool present = tile_row < rows && chunk * 8 < C::kDim;
    const DecodeCoord coord = coord_of_row(tile_row < rows ? tile_row : 0);
    const auto* const from =
        q + coord.row * p.q.token_stride + coord.query_head * p.q.head_stride + (present ? chunk * 8 : 0);
    const std::uint32_t to = map.q() + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kQueryTile)) +
                             cuda::swizzled(tile_row, chunk % 8);
    if (aligned) {
      cuda::copy_16(to, from, present);
    } else {
      cuda::store_shared(to, present ? load_elements(from, false) : uint4{0, 0, 0, 0});
    }
  }
  cuda::copy_commit();
  cuda::copy_wait<0>();
  proxy_fence();
  named_sync(kDecodeBarrier, kDecodeConsumerThreads);
}

// The consumer warpgroup of a decode CTA. Its arithmetic is that of prefill's consumer (consumer.cuh): the same
// functions on the same fragments, in the same order. Only the layout of rows, tiles and results differs.

template <class C>
class Decoder {
 public:
  __device__ __forceinline__ Decoder(const typename C::Params& params, const DecodeMap<C>& map)
      : params_(params), p_(params.attention), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    load_queries<C>(p_, map_, rows_of(params_, work_tile),
                    [&](int tile_row) { return coord_of(params_, work_tile, tile_row); });
    attend(work_tile);
    if (finishes(params_, work_tile) || params_.partials.data != nullptr) return;
    for (int slice = 0; slice < params_.slices; ++slice) {
      merge_if_last<C, kDecodeConsumerThreads>(params_, work_tile, thread_of_cta(), slice);
    }
  }

 private:
  using Scores = float[C::kKeyTile / 8][4];

  __device__ __forceinline__ void attend(const DecodeWorkTile& work_tile) {
    const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
    const bool has_rows = thread_of_cta() / 32 * 16 < rows_of(params_, work_tile);
    rows_.flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_.shift[half] = 0.0F;
      rows_.l[half] = 0.0F;
    }
    if constexpr (HasPrefixes<typename C::Params>) {
      if (work_tile.resumes) {
        await_states();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (thread_rows.present[half]) {
            restore_row(params_, thread_rows.coord[half], rows_, half);
          } else {
            clear_row(half);
          }
        }
      }
    }
    clear_probabilities();
#pragma unroll 1
    for (int number = work_tile.begin; number < work_tile.end; ++number, ring_.advance()) {
      const bool special = number < plain.begin || number >= plain.end;
      score(thread_rows, number, special, has_rows);
      if (special) start_rows(work_tile, thread_rows, number);
      add_outputs(number == work_tile.begin && !work_tile.resumes, work_tile.seq_info.length - number * C::kKeyTile);
    }
    store_rows(work_tile, thread_rows, work_tile.end);
  }

  // A tile's probabilities and the thread's shares of their sums. Warps without rows skip the arithmetic.
  __device__ __forceinline__ void score(const ThreadRows& thread_rows, int number, bool special, bool has_rows) {
    Scores s;
    barrier_wait(map_.k_full(ring_.stage()), ring_.parity());
    qk_gemm<C>(s, map_.q(), map_.k(ring_.stage()));
    wgmma_wait<0>();
    pin(s);
    if (has_rows) {
      if (p_.softmax.scaled_first) scale_scores(p_, s);
      if (special) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mask_scores<0, C::kKeyTile / 8>(p_, s, half, visible_columns<C>(thread_rows, half, number));
        }
      }
      if (!__all_sync(0xffffffffU, rows_.has_offset(0) && rows_.has_offset(1))) fix_offset<C>(p_, rows_, s);
      float sum[2];
      exponentiate<C>(p_, rows_.shift, s, sum);
      if (__any_sync(0xffffffffU, sum[0] > kMax || sum[1] > kMax)) [[unlikely]] {
        Recomputed<C> recomputed;
        recompute_key_tile<C>(p_, thread_rows, number, map_.q(), map_.k(ring_.stage()), rows_.shift[0], rows_.shift[1],
                              sum[0], sum[1], recomputed);
        take_over<C>(recomputed, rows_, s, sum);
      }
      pack<C>(s, probability_);
      rows_.l[0] = __fadd_rn(rows_.l[0], sum[0]);
      rows_.l[1] = __fadd_rn(rows_.l[1], sum[1]);
    }
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.k_empty(ring_.stage()));
  }

  // Stores rows whose last tile was the previous one. Clears the acc of rows whose first tile this is: earlier tiles of
  // other rows have added 0 · V to it.
  __device__ __forceinline__ void start_rows(const DecodeWorkTile& work_tile, const ThreadRows& thread_rows,
                                             int number) {
    if (number == work_tile.begin) return;
    store_rows(work_tile, thread_rows, number);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (thread_rows.begin[half] == number) clear_row(half);
    }
  }

  // Stores the rows that end before tile `number`.
  __device__ __forceinline__ void store_rows(const DecodeWorkTile& work_tile, const ThreadRows& thread_rows,
                                             int number) {
    const float sums[2] = {sum_of_quad(rows_.l[0]), sum_of_quad(rows_.l[1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (thread_rows.end[half] != number || !thread_rows.present[half]) continue;
      if (thread_rows.begin[half] == thread_rows.end[half]) {
        // another work tile has the row, or the merge sees that it attends to no key
        if (!finishes(params_, work_tile)) continue;
        clear_row(half);
      }
      store_row<C>(params_, work_tile, thread_rows, rows_, half, sums[half]);
    }
  }

  __device__ __forceinline__ void add_outputs(bool first, int keys) {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
    if (keys < C::kKeyTile) clear_tail(keys);
    pv_gemm<C>(rows_.o, probability_, map_.v(ring_.stage()), first);
    wgmma_wait<0>();
    pin(rows_.o);
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.v_empty(ring_.stage()));
  }

  // Zeroes rows of V past the end of the sequence. They have foreign data or those of another tile: their probabilities
  // are 0, but 0 · ∞ is NaN.
  __device__ __forceinline__ void clear_tail(int keys) const {
#pragma unroll 1
    for (int panel = 0; panel < C::kPanelsV; ++panel) {
      const std::uint32_t at =
          map_.v(ring_.stage()) + static_cast<std::uint32_t>(panel * cuda::panel_bytes(C::kKeyTile));
      for (int chunk = keys * 8 + thread_of_cta(); chunk < C::kKeyTile * 8; chunk += kDecodeConsumerThreads) {
        cuda::store_shared(at + static_cast<std::uint32_t>(chunk * 16), uint4{0, 0, 0, 0});
      }
    }
    proxy_fence();
    named_sync(kDecodeBarrier, kDecodeConsumerThreads);
  }

  __device__ __forceinline__ void clear_row(int half) {
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {
      rows_.o[n][2 * half] = 0.0F;
      rows_.o[n][2 * half + 1] = 0.0F;
    }
  }
  __device__ __forceinline__ void clear_probabilities() {
#pragma unroll
    for (int step = 0; step < C::kKeyTile / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) probability_[step][i] = 0;
    }
  }

  static constexpr float kMax = kRescaleThreshold<typename C::Element>;

  const typename C::Params& params_;
  const cuda::AttentionParams& p_;
  const DecodeMap<C>& map_;
  PackedPipelineState<C::kStages> ring_;
  AttentionState<C> rows_;
  std::uint32_t probability_[C::kKeyTile / 16][4];
};

template <class C>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ typename C::Params params) {
  const DecodeMap<C> map;
  if (threadIdx.x == 0) init_decode_barriers(map);
  cuda::pdl_launch_dependents();
  pdl_wait_before_step(params);
  if (threadIdx.x >= kDecodeConsumerThreads) count_work_tiles<C>(params, map);
  __syncthreads();
  const int work_tiles = work_tile_count(params, map);
  int ctas = static_cast<int>(gridDim.x);
  if (params.late > 0 && !any_partial_split<C>(params)) ctas -= params.late;
  const auto each_work_tile = [&](auto&& worker) {
    if (static_cast<int>(blockIdx.x) >= ctas) return;
    for (int n = static_cast<int>(blockIdx.x); n < work_tiles; n += ctas) {
      worker.process(work_tile_of<C>(params, map, n));
    }
  };
  if (threadIdx.x < kDecodeConsumerThreads) {
    each_work_tile(Decoder<C>(params, map));
  } else {
    each_work_tile(TileProducer<C>(params, map));
  }
  await_prefixes(params);
}

}  // namespace ringattn::sm90
