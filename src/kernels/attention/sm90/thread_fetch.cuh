// SPDX-License-Identifier: Apache-2.0
// The producer's work done by threads, for tensors that TMA can't access: rows that are not 16-byte aligned, unevenly
// spaced pages, or more sources than a launch has tensor maps for. The same tiles arrive in the same layout, but more
// slowly. In a CTA pair each CTA then loads whole tiles for itself.
#pragma once

#include "kernels/attention/sm90/producer.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/threads.cuh"

namespace ringattn::sm90 {

inline constexpr int kProducerThreads = 96;  // the producer warpgroup without the scheduler warp
inline constexpr int kFetchBarrier = 8;

// Copies rows [begin, end) of `count` rows of a tile whose panels have `panel_rows` rows, and zeroes the others of the
// `count` rows.
__device__ __forceinline__ void copy_rows(std::uint32_t target, const cuda::RowsOf& rows, int columns, int panel_rows,
                                          int count, int begin, int end, int thread) {
  const int chunks = (columns + kPanelColumns - 1) / kPanelColumns * 8;
#pragma unroll 1
  for (int i = thread; i < count * chunks; i += kProducerThreads) {
    const int row = i / chunks;
    const int chunk = i % chunks;
    uint4 elements{0, 0, 0, 0};
    if (row >= begin && row < end && chunk * 8 < columns) {
      const char* from = rows.at(row) + chunk * 16;
      if (rows.aligned()) {
        elements = *reinterpret_cast<const uint4*>(from);
      } else {
        const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
        elements.x = halves[0] | static_cast<std::uint32_t>(halves[1]) << 16;
        elements.y = halves[2] | static_cast<std::uint32_t>(halves[3]) << 16;
        elements.z = halves[4] | static_cast<std::uint32_t>(halves[5]) << 16;
        elements.w = halves[6] | static_cast<std::uint32_t>(halves[7]) << 16;
      }
    }
    cuda::store_shared(
        target + static_cast<std::uint32_t>(chunk / 8 * panel_rows * kPanelRowBytes) + cuda::swizzled(row, chunk % 8),
        elements);
  }
}

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
      copy_rows(map.q(q_stage.stage(), head_tile), {q, 2 * p.q.token_stride}, C::kDim, kQueryTile, kQueryTile,
                rows.valid_row_begin, rows.valid_row_end, thread);
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
        copy_rows(map.k(stage) + offset, {k, 2 * source.k_token_stride}, C::kDim, C::kKeyTile, params.page_run_keys, 0,
                  present, thread);
        const char* v = static_cast<const char*>(source.v) + 2 * cuda::v_offset(source, row, work.kv_head);
        copy_rows(map.v(stage) + offset, {v, 2 * source.v_token_stride}, C::kDimV, C::kKeyTile, params.page_run_keys, 0,
                  present, thread);
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
