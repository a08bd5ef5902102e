// SPDX-License-Identifier: Apache-2.0
// The tile scheduler: one warp of each CTA, which decides what the CTA computes next and tells the other warps through
// the Q stage in shared memory.
//
// CTAs are persistent and scheduling is dynamic: all CTAs fetch work from one atomic counter in global memory. Each
// fetches as late as it can, because fetched work can't go to another CTA that is free sooner. In a CTA pair the first
// CTA fetches, and sends the index to its peer.
#pragma once

#include "kernels/attention/cuda/work_order.hpp"
#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/attention/visibility.hpp"
#include "kernels/common/sm90/cluster.cuh"

namespace ringattn::sm90 {

// The next work is fetched when the producer loads the tile that has kTilesAhead tiles after it in this Q stage. That
// is early enough for the next Q stage's tables and Q to arrive in time. After a Q stage with no more tiles than that,
// the scheduler fetches the next work at once, without waiting for the producer.
inline constexpr int kTilesAhead = 4;

// Index of the tile at which the producer asks the scheduler for the next work, in a Q stage of `tiles` tiles.
// kNeverRequested if it doesn't ask: the Q stage is short, or the peer CTA fetches.
inline constexpr int kNeverRequested = -1;
template <class C>
__device__ __forceinline__ int requested_at(int tiles) {
  const bool fetches = C::kClusterCtas == 1 || rank_in_cluster() == 0;
  return fetches && tiles > kTilesAhead ? tiles - kTilesAhead - 1 : kNeverRequested;
}

// Writes which keys the rows see, which tiles may be masked, and where KV splits begin. Tiles are in ascending order,
// so the masked tiles are the first and the last ones. If the tiles are in several runs, the host has counted the
// masked ones.
template <class C>
__device__ __forceinline__ void set_edges(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile,
                                          HeadWorkTileInfo& head_tile) {
  const int tiles = work_tile.tiles;
  const std::int64_t first = work_tile.first_tile;
  const std::int64_t origin = first * C::kKeyTile;
  // A key relative to the first tile's first key, limited to ±kNoEdge.
  const auto edge = [&](std::int64_t key) {
    const std::int64_t from_origin = key - origin;
    return static_cast<int>(from_origin < -kNoEdge ? -kNoEdge : from_origin > kNoEdge ? kNoEdge : from_origin);
  };
  const Visibility visibility(p.mask, work_tile.key_length);
  const KeyRange visible = visibility.mask_range(work_tile.position);
  head_tile.origin = static_cast<int>(first);
  head_tile.from = edge(visible.begin);
  head_tile.to = edge(visible.end);
  head_tile.length = edge(work_tile.key_length);

  const auto tiles_before = [](int key) { return key < 0 ? 0 : key / C::kKeyTile; };
  const KeyRange common = visibility.common_keys(work_tile.position, work_tile.position + kQueryTile - 1);
  const bool one_run = work_tile.runs == 1;
  const int unmasked_begin = one_run ? tiles_before(edge(common.begin) + C::kKeyTile - 1) : work_tile.unmasked_begin;
  const int unmasked_end = one_run ? tiles_before(edge(common.end)) : work_tile.unmasked_end;
  head_tile.head = tiles - (unmasked_begin < tiles ? unmasked_begin : tiles);
  head_tile.tail = tiles - (unmasked_end < tiles ? unmasked_end : tiles);
  head_tile.split_begin = (work_tile.split_position + tiles) % kTilesPerKvSplit;
  if (p.state.save && head_tile.split_begin == 0 && head_tile.tail == 0)
    head_tile.tail = 1;  // in the last tile, the consumer then checks whether the split is complete
}

// Fetches work indices from the counter. Work index n stands for the scheduler entry and KV head that
// cuda::work_index(…, n) returns. Whole warps call its functions.
template <class C>
class Counter {
 public:
  __device__ __forceinline__ Counter(const cuda::AttentionParams& p, const SharedMap<C>& map)
      : p_(p), map_(map), rank_(C::kClusterCtas > 1 ? rank_in_cluster() : 0) {}

  __device__ __forceinline__ std::uint32_t rank() const { return rank_; }
  // Number of work indices.
  __device__ __forceinline__ int work() const { return p_.tables.gqa_tile_count * p_.schedule.entry_heads; }

  // A CTA's first work index. next() continues after those of all CTAs.
  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x) / C::kClusterCtas; }
  // The next work index. There is no more work if it is work() or more.
  __device__ __forceinline__ int next() {
    const bool leads = threadIdx.x % 32 == 0;
    int number = 0;
    if (leads) number = rank_ > 0 ? receive() : fetch_and_send();
    number = __shfl_sync(0xffffffffU, number, 0);
    // The first CTA may overwrite the index as soon as it counts as read. An arrival may overtake a load that has only
    // been issued. So the lane that has loaded the index arrives, after using it, and with release semantics at cluster
    // scope.
    if (rank_ > 0 && leads) barrier_release_at(map_to_cta(map_.number_read(), 0));
    return number;
  }

 private:
  // One lane calls each of these.
  __device__ __forceinline__ int fetch_and_send() {
    int number = atomicAdd(p_.schedule.taken, 1);
    // A CTA's first work is not fetched from the counter, but each CTA fetches once more at the end, when there is no
    // work left. So there are as many fetches as work indices, and the CTA with the last one resets the counter for the
    // next task with these tables.
    if (number == work() - 1) atomicExch(p_.schedule.taken, 0);
    number += static_cast<int>(gridDim.x) / C::kClusterCtas;
    if constexpr (C::kClusterCtas > 1) send(number);
    return number;
  }
  __device__ __forceinline__ void send(int number) {
    barrier_acquire(map_.number_read(), parity_ ^ 1U);
    parity_ ^= 1U;
    dsmem_store_async(map_to_cta(map_.number(), 1), map_to_cta(map_.number_sent(), 1), number);
  }
  __device__ __forceinline__ int receive() {
    barrier_arrive_expect(map_.number_sent(), sizeof(int));
    barrier_acquire(map_.number_sent(), parity_);
    parity_ ^= 1U;
    return load_number(map_.number());
  }

  const cuda::AttentionParams& p_;
  const SharedMap<C>& map_;
  std::uint32_t rank_;
  std::uint32_t parity_ = 0;
};

// Main loop of the scheduler warp: writes the KV loop and the head work tiles of each Q stage until there is no more
// work.
template <class C>
__device__ __forceinline__ void schedule(const cuda::AttentionParams& p, const SharedMap<C>& map,
                                         unsigned char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int heads_per_gqa_tile = p.schedule.heads_per_gqa_tile;
  Counter<C> counter(p, map);
  const int first_head_tile = static_cast<int>(counter.rank()) * C::kHeadTiles;
  PackedPipelineState<C::kQStages> cursor;
  int tiles = 0;                     // tiles of the previous Q stage
  std::uint32_t request_parity = 0;  // parity of work_requested()
  for (int q_stage = 0;; ++q_stage, cursor.advance()) {
    if (requested_at<C>(tiles) != kNeverRequested) {
      barrier_wait(map.work_requested(), request_parity);
      request_parity ^= 1U;
    }
    const int index = q_stage == 0 ? counter.first() : counter.next();
    // The tables are read before the wait for an empty Q stage, because in short Q stages nothing else hides their
    // latency.
    const bool any = index < counter.work();
    HeadWorkTileInfo head_tile{};
    GqaPackedTileInfo work{};
    head_tile.kv_loop = work.tiles = kNoMoreWork;
    if (any) {
      const cuda::WorkIndex work_index =
          cuda::work_index(p.schedule.early_entries, p.schedule.entry_heads, p.schedule.swizzle_heads, index);
      const cuda::GqaPackedTile& gqa_tile = p.tables.gqa_tiles[work_index.entry];
      const int query_head = p.tables.work_tiles[gqa_tile.work_tile].head + work_index.head * heads_per_gqa_tile;
      tiles = gqa_tile.tiles;
      head_tile.kv_loop = gqa_tile.tiles;
      if (lane < C::kHeadTiles && first_head_tile + lane < gqa_tile.head_tiles) {
        const int nth = gqa_tile.head + first_head_tile + lane;
        const cuda::WorkTile& work_tile = p.tables.work_tiles[gqa_tile.work_tile + nth / heads_per_gqa_tile];
        head_tile.row = work_tile.row;
        head_tile.first = work_tile.first;
        head_tile.run_begin = work_tile.run_begin;
        head_tile.runs = work_tile.runs;
        head_tile.valid_row_begin = work_tile.valid_row_begin;
        head_tile.valid_row_end = work_tile.valid_row_end;
        head_tile.query_head = query_head + nth % heads_per_gqa_tile;
        if (work_tile.tiles > 0) {
          head_tile.begin = static_cast<int>(work_tile.first - gqa_tile.first);
          head_tile.end = head_tile.begin + work_tile.tiles;
          set_edges<C>(p, work_tile, head_tile);
        }
      }
      work.first = gqa_tile.first;
      work.first_tile = gqa_tile.first_tile;
      work.table = gqa_tile.table;
      work.key_length = p.tables.work_tiles[gqa_tile.work_tile].key_length;
      work.run_begin = gqa_tile.run_begin;
      work.runs = gqa_tile.runs;
      work.kv_head = query_head / (p.heads / p.kv_heads);
      const int own = gqa_tile.head_tiles - first_head_tile;
      work.head_tiles = own < 0 ? 0 : own < C::kHeadTiles ? own : C::kHeadTiles;
      work.tiles = gqa_tile.tiles;
    }
    if (q_stage >= C::kQStages) barrier_wait(map.q_empty(cursor.stage()), cursor.parity() ^ 1U);
    if (lane < C::kHeadTiles) head_tile_infos<C>(shared, cursor.stage())[lane] = head_tile;
    if (lane == 0) *work_info_of<C>(shared, cursor.stage()) = work;
    barrier_arrive(map.work_full(cursor.stage()));
    if (!any) return;
  }
}

}  // namespace ringattn::sm90
