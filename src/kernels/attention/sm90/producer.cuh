// SPDX-License-Identifier: Apache-2.0
// The producer of sm90_attention: TMA loads of Q, K and V, and loads by threads where TMA cannot be used.
#pragma once

#include <cstdint>

#include "kernels/attention/sm90/hopper_params.hpp"
#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/copy_rows.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"

namespace ringattn::sm90 {

// The two load warps of a CTA. The producer warp issues TMA loads of query and key tiles. The tail warp zeroes the rows
// of a V tile that lie past the end of its sequence. In a CTA pair each CTA loads half of each key tile's rows and
// multicasts it to both.

// Instead of a stage: there are no more V tiles.
inline constexpr int kNoMoreTails = -1;

// Instead of a source: this lane loads no part of the tile.
inline constexpr int kNotMine = -1;

// Source and row of a key tile, or of one of its page runs, and how many keys the tile has.
struct TileCoord {
  int source;
  int keys;
  std::int64_t row;
};

// The same with TMA's 32-bit coordinates: can_map() keeps rows within that range.
struct TileBox {
  int source;
  int row;
  int keys;
};

// The i-th tile of a Q stage's KV loop.
template <class C>
__device__ __forceinline__ TileCoord find_tile(const cuda::AttentionParams& p, const GqaPackedTileInfo& work, int i) {
  const auto [tile, entry] = cuda::tile_of_kv_loop(p.tables, work, i);
  const std::int64_t left = work.key_length - tile * C::kKeyTile;
  return {entry->source, left < C::kKeyTile ? static_cast<int>(left) : C::kKeyTile, entry->row};
}

// Assignment of tiles with several page runs to the producer's lanes: each lane loads one page run of one of several
// tiles. Recomputed from the kernel parameters each time, since the producer has no registers to spare.
template <class C>
struct PageRunLanes {
  const HopperParams& params;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ int tiles() const { return 32 >> params.lanes_log; }    // looked up at a time
  __device__ __forceinline__ int nth() const { return lane() >> params.lanes_log; }  // this lane's tile among them
  __device__ __forceinline__ int first_lane(int nth) const { return nth << params.lanes_log; }  // first lane of a tile
  __device__ __forceinline__ int page_run() const { return lane() & ((1 << params.lanes_log) - 1); }
  __device__ __forceinline__ int first_key() const {
    return page_run() * params.page_run_keys;
    // ^first key of the page run in its tile
  }
  // Whether the tile has this page run and this CTA loads it: in a CTA pair each CTA loads half of the page runs.
  __device__ __forceinline__ bool fetches() const {
    const int page_runs = params.attention.tables.page_runs;
    if constexpr (C::kClusterCtas > 1) {
      const int of_first = (page_runs + 1) / 2;
      return rank_in_cluster() > 0 ? page_run() >= of_first && page_run() < page_runs : page_run() < of_first;
    }
    return page_run() < page_runs;
  }
  // Keys of a tile, rounded up to the end of the last page run that has any of `keys`. Page runs have 16, 32 or 64
  // keys.
  __device__ __forceinline__ int whole_page_runs(int keys) const {
    return (keys + params.page_run_keys - 1) & -params.page_run_keys;
  }
};

// This lane's page run of the i-th tile of a Q stage's KV loop. The entries of page runs without keys are not read.
template <class C>
__device__ __forceinline__ TileCoord find_page_run(const GqaPackedTileInfo& work, int i, const PageRunLanes<C>& lanes) {
  const auto [tile, page_runs] = cuda::tile_of_kv_loop(lanes.params.attention.tables, work, i);
  const std::int64_t left = work.key_length - tile * C::kKeyTile;
  const int keys = left < C::kKeyTile ? static_cast<int>(left) : C::kKeyTile;
  if (!lanes.fetches() || lanes.first_key() >= keys) return {kNotMine, keys, 0};
  return {page_runs[lanes.page_run()].source, keys, page_runs[lanes.page_run()].row};
}

// The i-th tile of a batch that the lanes have looked up, broadcast to the warp; with page runs, this lane's page run
// of it.
template <bool kPageRuns, class C>
__device__ __forceinline__ TileBox box_of(const TileCoord& batch, int i, const PageRunLanes<C>& lanes) {
  constexpr unsigned kAll = 0xffffffffU;
  if constexpr (kPageRuns) {
    return {lanes.nth() == i ? batch.source : kNotMine, static_cast<int>(batch.row),
            __shfl_sync(kAll, batch.keys, lanes.first_lane(i))};
  } else {
    return {__shfl_sync(kAll, batch.source, i), __shfl_sync(kAll, static_cast<int>(batch.row), i),
            __shfl_sync(kAll, batch.keys, i)};
  }
}

// Loads Q of a Q stage's head work tiles. One lane calls it.
template <class C>
__device__ __forceinline__ void fetch_queries(const HopperParams& params, const SharedMap<C>& map,
                                              const GqaPackedTileInfo& work, const HeadWorkTileInfo* head_tiles,
                                              std::uint32_t q_stage) {
  if (work.tiles <= 0) {
    barrier_arrive(map.q_full(q_stage));
    return;
  }
  barrier_arrive_expect(map.q_full(q_stage), work.head_tiles * C::kQBytes);
  for (int head_tile = 0; head_tile < work.head_tiles; ++head_tile) {
    const int row = static_cast<int>(head_tiles[head_tile].row);
#pragma unroll
    for (int column = 0; column < C::kDim; column += C::kBoxColumns) {
      tma_load_box(
          map.q(q_stage, head_tile) + static_cast<std::uint32_t>(column / kPanelColumns * SharedMap<C>::kQPanel),
          &params.q, map.q_full(q_stage), column, head_tiles[head_tile].query_head, row);
    }
  }
}

// Loads K or V of a tile. In a CTA pair each CTA loads its share of the rows for both, and each CTA's barrier counts
// the bytes of both shares.
template <class C, int kColumns, int kBox>
__device__ __forceinline__ void load_keys(std::uint32_t target, const CUtensorMap* from, std::uint32_t barrier,
                                          int head, int row) {
  const int first = C::kClusterCtas > 1 ? static_cast<int>(rank_in_cluster()) * C::kKeyBoxRows : 0;
#pragma unroll
  for (int column = 0; column < kColumns; column += kBox) {
    const std::uint32_t box =
        target + static_cast<std::uint32_t>(column / kPanelColumns * SharedMap<C>::kTilePanel + first * kPanelRowBytes);
    if constexpr (C::kClusterCtas > 1) {
      tma_multicast_box((1U << C::kClusterCtas) - 1U, box, from, barrier, column, head, row + first);
    } else {
      tma_load_box(box, from, barrier, column, head, row);
    }
  }
}

// Loads K or V of this lane's page run of a tile; in a CTA pair, for both CTAs. A page run fills a part of each panel.
template <class C, int kColumns>
__device__ __forceinline__ void load_page_run(std::uint32_t target, const CUtensorMap* from, std::uint32_t barrier,
                                              int head, int row, const PageRunLanes<C>& lanes) {
  const std::uint32_t first = target + static_cast<std::uint32_t>(lanes.first_key() * kPanelRowBytes);
#pragma unroll
  for (int column = 0; column < kColumns; column += kPanelColumns) {
    const std::uint32_t box = first + static_cast<std::uint32_t>(column / kPanelColumns * SharedMap<C>::kTilePanel);
    if constexpr (C::kClusterCtas > 1) {
      tma_multicast_box((1U << C::kClusterCtas) - 1U, box, from, barrier, column, head, row);
    } else {
      tma_load_box(box, from, barrier, column, head, row);
    }
  }
}

// Main loop of the producer warp. All lanes pass the barriers together. One lane issues the loads of a tile, or one
// lane for each of its page runs (kPageRuns).
template <class C, bool kPageRuns>
__device__ __forceinline__ void fetch(const HopperParams& params, const SharedMap<C>& map, unsigned char* shared) {
  const cuda::AttentionParams& p = params.attention;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const PageRunLanes<C> lanes{params};
  const int batch_tiles = kPageRuns ? lanes.tiles() : 32;  // looked up at a time
  PackedPipelineState<C::kQStages> q_stage;
  PackedPipelineState<C::kStages> ring;
  PackedPipelineState<C::kStages> ring_v;  // stage of V, which is loaded one tile after K (C::kKeysAhead)
  std::uint32_t tails = 0;                 // V tiles posted to the tail warp so far
  std::uint32_t pace_parity = 0;           // parity of pace_free()
  for (;; q_stage.advance()) {
    barrier_wait(map.work_full(q_stage.stage()), q_stage.parity());
    const GqaPackedTileInfo& work = *work_info_of<C>(shared, q_stage.stage());
    const int tiles = work.tiles;
    if (lane == 0) fetch_queries<C>(params, map, work, head_tile_infos<C>(shared, q_stage.stage()), q_stage.stage());
    if (tiles == kNoMoreWork) break;
    const int kv_head = work.kv_head;
    const int request_tile = requested_at<C>(tiles);
    // The loads of a tile's K and of its V.
    const auto copy_k = [&](const TileBox& tile, std::uint32_t stage) {
      const std::uint32_t landed = map.k_full(stage);
      if constexpr (kPageRuns) {
        if (lane == 0) barrier_arrive_expect(landed, lanes.whole_page_runs(tile.keys) * (C::kKBytes / C::kKeyTile));
        __syncwarp();
        if (tile.source == kNotMine) return;
        load_page_run<C, C::kDim>(map.k(stage), &params.k[tile.source], landed, kv_head, tile.row, lanes);
      } else {
        if (lane != 0) return;
        barrier_arrive_expect(landed, C::kKBytes);
        load_keys<C, C::kDim, C::kBoxColumnsK>(map.k(stage), &params.k[tile.source], landed, kv_head, tile.row);
      }
    };
    const auto copy_v = [&](const TileBox& tile, std::uint32_t stage) {
      if (!kPageRuns && lane != 0) return;
      // Rows past the end of the sequence have foreign data. Their probabilities are 0, but 0 · ∞ is NaN. So the tail
      // warp zeroes them before v_full is signalled.
      const bool whole = tile.keys == C::kKeyTile;
      std::uint32_t landed = map.v_full(stage);
      if (!whole) {
        landed = map.tail_landed();
        if (tails > 0) barrier_wait(map.tail_done(), (tails - 1) & 1U);
      }
      if constexpr (kPageRuns) {
        if (lane == 0) barrier_arrive_expect(landed, lanes.whole_page_runs(tile.keys) * (C::kVBytes / C::kKeyTile));
        __syncwarp();
        if (tile.source != kNotMine) {
          load_page_run<C, C::kDimV>(map.v(stage), &params.v[tile.source], landed, kv_head, tile.row, lanes);
        }
      } else {
        barrier_arrive_expect(landed, C::kVBytes);
        load_keys<C, C::kDimV, C::kBoxColumnsV>(map.v(stage), &params.v[tile.source], landed, kv_head, tile.row);
      }
      if (!whole) {
        if (lane == 0) {
          store_number(map.tail_stage(), static_cast<int>(stage));
          store_number(map.tail_keys(), tile.keys);
          barrier_arrive(map.tail_requested());
        }
        ++tails;
      }
    };
    TileBox last{};  // the tile whose K was loaded last; its V comes next (C::kKeysAhead)
    const auto copy_last_v = [&] {
      barrier_wait(map.v_empty(ring_v.stage()), ring_v.parity() ^ 1U);
      __syncwarp();
      copy_v(last, ring_v.stage());
      ring_v.advance();
    };
    // Each lane looks up one tile, or one page run of a tile, one batch ahead.
    TileCoord ahead{};
    const auto look_up = [&](int begin) {
      if constexpr (kPageRuns) {
        if (begin + lanes.nth() < tiles) ahead = find_page_run<C>(work, begin + lanes.nth(), lanes);
      } else {
        if (begin + lane < tiles) ahead = find_tile<C>(p, work, begin + lane);
      }
    };
    look_up(0);
    for (int first = 0; first < tiles; first += batch_tiles) {
      const TileCoord batch = ahead;
      look_up(first + batch_tiles);
      const int end = tiles - first < batch_tiles ? tiles - first : batch_tiles;
      if (p.schedule.keep_pace && (!kPageRuns || first % 32 == 0)) {
        if (lane == 0) {
          store_number(map.pace_tiles(), tiles - first < 32 ? tiles - first : 32);
          barrier_arrive(map.pace_requested());
        }
        barrier_wait(map.pace_free(), pace_parity);
        pace_parity ^= 1U;
      }
      for (int i = 0; i < end; ++i, ring.advance()) {
        const TileBox tile = box_of<kPageRuns>(batch, i, lanes);
        if (lane == 0 && first + i == request_tile) barrier_arrive(map.work_requested());
        barrier_wait(map.k_empty(ring.stage()), ring.parity() ^ 1U);
        __syncwarp();  // all lanes have passed the barrier before its next phase can end
        copy_k(tile, ring.stage());
        if constexpr (C::kKeysAhead) {
          if (first + i > 0) copy_last_v();
          last = tile;
        } else {
          __syncwarp();
          copy_v(tile, ring.stage());
        }
      }
    }
    if (C::kKeysAhead && tiles > 0) copy_last_v();
    barrier_arrive(map.q_empty(q_stage.stage()));
  }
  if (lane == 0) {
    if (p.schedule.keep_pace) {
      store_number(map.pace_tiles(), kNoMoreWork);
      barrier_arrive(map.pace_requested());
    }
    if (tails > 0) barrier_wait(map.tail_done(), (tails - 1) & 1U);
    store_number(map.tail_stage(), kNoMoreTails);
    barrier_arrive(map.tail_requested());
  }
}

// Main loop of the tail warp: zeroes the rows of a V tile that lie past the end of its sequence, then signals v_full.
template <class C>
__device__ __forceinline__ void clear_tails(const SharedMap<C>& map) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    barrier_wait(map.tail_requested(), parity);
    const int stage = load_number(map.tail_stage());
    const int rows = load_number(map.tail_keys());
    if (stage == kNoMoreTails) return;
    barrier_wait(map.tail_landed(), parity);
    for (int panel = 0; panel < C::kPanelsV; ++panel) {
      for (int chunk = rows * 8 + lane; chunk < C::kKeyTile * 8; chunk += 32) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         map.v(static_cast<std::uint32_t>(stage)) +
                         static_cast<std::uint32_t>(panel * SharedMap<C>::kTilePanel + chunk * 16)),
                     "r"(0)
                     : "memory");
      }
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) barrier_arrive(map.v_full(static_cast<std::uint32_t>(stage)));
    barrier_arrive(map.tail_done());
    if constexpr (C::kClusterCtas > 1) barrier_arrive_at(map_to_cta(map.tail_done(), rank_in_cluster() ^ 1U));
  }
}

// The producer's work done by threads, for tensors that TMA can't access: rows that are not 16-byte aligned, unevenly
// spaced pages, or more sources than a launch has tensor maps for. The same tiles arrive in the same layout, but more
// slowly. In a CTA pair each CTA then loads whole tiles for itself.

inline constexpr int kProducerThreads = 96;  // the producer warpgroup without the scheduler warp
inline constexpr int kFetchBarrier = 8;

// `thread` is 0 … kProducerThreads − 1.
template <class C>
__device__ __forceinline__ void fetch_by_threads(const HopperParams& params, const SharedMap<C>& map,
                                                 unsigned char* shared, int thread) {
  const cuda::AttentionParams& p = params.attention;
  // Makes the writes of all producer threads visible to wgmma.
  const auto publish = [&] {
    proxy_fence();
    named_sync(kFetchBarrier, kProducerThreads);
  };
  PackedPipelineState<C::kQStages> q_stage;
  PackedPipelineState<C::kStages> ring;
  for (;; q_stage.advance()) {
    barrier_wait(map.work_full(q_stage.stage()), q_stage.parity());
    const GqaPackedTileInfo& work = *work_info_of<C>(shared, q_stage.stage());
    const HeadWorkTileInfo* const head_tiles = head_tile_infos<C>(shared, q_stage.stage());
    const int tiles = work.tiles;
    for (int head_tile = 0; tiles > 0 && head_tile < work.head_tiles; ++head_tile) {
      const HeadWorkTileInfo& rows = head_tiles[head_tile];
      const char* q =
          static_cast<const char*>(p.q.data) + 2 * (rows.row * p.q.token_stride + rows.query_head * p.q.head_stride);
      copy_rows<kProducerThreads>(map.q(q_stage.stage(), head_tile), {q, 2 * p.q.token_stride}, C::kDim, kQueryTile,
                                  kQueryTile, rows.valid_row_begin, rows.valid_row_end, thread);
    }
    publish();
    if (thread == 0) barrier_arrive(map.q_full(q_stage.stage()));
    if (tiles == kNoMoreWork) return;
    const int request_tile = requested_at<C>(tiles);
    for (int i = 0; i < tiles; ++i, ring.advance()) {
      if (thread == 0 && i == request_tile) barrier_arrive(map.work_requested());
      const auto [tile, page_runs] = cuda::tile_of_kv_loop(p.tables, work, i);
      const cuda::SourceEntry& source = cuda::source_of(p.tables, page_runs->source);
      const std::int64_t remaining = work.key_length - tile * C::kKeyTile;
      const int keys = remaining < C::kKeyTile ? static_cast<int>(remaining) : C::kKeyTile;
      const std::uint32_t stage = ring.stage();
      barrier_wait(map.k_empty(stage), ring.parity() ^ 1U);
      if (C::kKeysAhead) barrier_wait(map.v_empty(stage), ring.parity() ^ 1U);
#pragma unroll 1
      for (int page_run = 0; page_run < p.tables.page_runs; ++page_run) {
        const int first = page_run * params.page_run_keys;
        const int left = keys - first;
        // a page run without keys gets any row, which is not read
        const std::int64_t row = page_runs[left > 0 ? page_run : 0].row;
        const int present = left < params.page_run_keys ? left : params.page_run_keys;
        const auto offset = static_cast<std::uint32_t>(first * kPanelRowBytes);
        const char* k = static_cast<const char*>(source.k) + 2 * cuda::k_offset(source, row, work.kv_head);
        copy_rows<kProducerThreads>(map.k(stage) + offset, {k, 2 * source.k_token_stride}, C::kDim, C::kKeyTile,
                                    params.page_run_keys, 0, present, thread);
        const char* v = static_cast<const char*>(source.v) + 2 * cuda::v_offset(source, row, work.kv_head);
        copy_rows<kProducerThreads>(map.v(stage) + offset, {v, 2 * source.v_token_stride}, C::kDimV, C::kKeyTile,
                                    params.page_run_keys, 0, present, thread);
      }
      publish();
      if (thread == 0) {
        barrier_arrive(map.k_full(stage));
        barrier_arrive(map.v_full(stage));
      }
    }
    barrier_arrive(map.q_empty(q_stage.stage()));
  }
}

}  // namespace ringattn::sm90
