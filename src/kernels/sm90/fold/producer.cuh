// SPDX-License-Identifier: Apache-2.0
// The warps that bring tiles: one has the copy engine fetch those of queries and keys, one clears what a value tile
// holds past its sequence's end. CTAs that walk side by side fetch a share of each key tile's rows, for all of them.
#pragma once

#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/fold/scheduler.cuh"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

// Where a key tile lies, in which source and at which row, and how many keys it has.
struct TilePlace {
  int source;
  int keys;
  std::int64_t row;
};

struct TileBox {  // the same, where the copy engine reaches it: can_map() keeps rows within 32 bits
  int source;
  int row;
  int keys;
};

template <class C>
__device__ __forceinline__ TilePlace find_tile(const cuda::FoldParams& p, const BundleWork& work, int i) {
  std::int64_t tile = work.first_tile + i;
  std::int64_t index = work.table + i;
  if (work.runs > 1) {
    const std::int64_t number = work.first + i;
    const cuda::RunEntry& entry = find_run(p.tables.runs + work.run_begin, work.runs, number);
    tile = entry.first_tile + number - entry.first;
    index = entry.table + number - entry.first;
  }
  const cuda::TileEntry& entry = p.tables.tiles[index];
  const std::int64_t left = work.key_length - tile * C::kKeyTile;
  return {entry.source, left < C::kKeyTile ? static_cast<int>(left) : C::kKeyTile, entry.row};
}

template <class C>
__device__ __forceinline__ void fetch_queries(const HopperParams& params, const SharedMap<C>& map,
                                              const BundleWork& work, const UnitWork* units, std::uint32_t round) {
  if (work.tiles <= 0) {
    barrier_arrive(map.q_full(round));
    return;
  }
  barrier_arrive_expect(map.q_full(round), work.units * C::kQBytes);
  for (int unit = 0; unit < work.units; ++unit) {
    const int row = static_cast<int>(units[unit].row);
#pragma unroll
    for (int column = 0; column < C::kDim; column += C::kBoxColumns) {
      load_box(map.q(round, unit) + static_cast<std::uint32_t>(column / kPanelColumns * SharedMap<C>::kQPanel),
               &params.q, map.q_full(round), column, units[unit].query_head, row);
    }
  }
}

// K or V of a tile. Side by side each CTA fetches its share of the rows, for all: their barriers wait for all of them.
template <class C, int kColumns, int kBox>
__device__ __forceinline__ void load_keys(std::uint32_t target, const CUtensorMap* from, std::uint32_t barrier,
                                          int head, int row) {
  const int first = C::kWalkCtas > 1 ? static_cast<int>(rank_in_cluster()) * C::kKeyBoxRows : 0;
#pragma unroll
  for (int column = 0; column < kColumns; column += kBox) {
    const std::uint32_t box =
        target + static_cast<std::uint32_t>(column / kPanelColumns * SharedMap<C>::kTilePanel + first * kPanelRowBytes);
    if constexpr (C::kWalkCtas > 1) {
      load_box_for((1U << C::kWalkCtas) - 1U, box, from, barrier, column, head, row + first);
    } else {
      load_box(box, from, barrier, column, head, row);
    }
  }
}

template <class C>
__device__ __forceinline__ void fetch(const HopperParams& params, const SharedMap<C>& map, unsigned char* shared) {
  const cuda::FoldParams& p = params.fold;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingCursor<C::kRounds> round;
  RingCursor<C::kStages> ring;
  RingCursor<C::kStages> ring_v;  // where K goes ahead
  std::uint32_t tails = 0;        // told so far
  std::uint32_t paced = 0;        // parity
  for (;; round.advance()) {
    barrier_wait(map.work_full(round.stage()), round.parity());
    const BundleWork& work = *work_of<C>(shared, round.stage());
    const int tiles = work.tiles;
    if (lane == 0) fetch_queries<C>(params, map, work, units_of<C>(shared, round.stage()), round.stage());
    if (tiles < 0) break;
    const int kv_head = work.kv_head;
    const int wanted = wanted_with<C>(tiles);
    // Of one lane: the copies of a tile's K, and of its V.
    const auto copy_k = [&](const TileBox& tile, std::uint32_t stage) {
      barrier_arrive_expect(map.k_full(stage), C::kKBytes);
      load_keys<C, C::kDim, C::kBoxColumnsK>(map.k(stage), &params.k[tile.source], map.k_full(stage), kv_head,
                                             tile.row);
    };
    const auto copy_v = [&](const TileBox& tile, std::uint32_t stage) {
      // Rows past the sequence's end belong to somebody else: their V must not reach a product with 0.
      const bool whole = tile.keys == C::kKeyTile;
      std::uint32_t landed = map.v_full(stage);
      if (!whole) {
        landed = map.tail_landed();
        if (tails > 0) barrier_wait(map.tail_done(), (tails - 1) & 1U);
      }
      barrier_arrive_expect(landed, C::kVBytes);
      load_keys<C, C::kDimV, C::kBoxColumnsV>(map.v(stage), &params.v[tile.source], landed, kv_head, tile.row);
      if (!whole) {
        store_number(map.tail(), static_cast<int>(stage));
        store_number(map.tail() + 4, tile.keys);
        barrier_arrive(map.tail_told());
        ++tails;
      }
    };
    TileBox last{};  // where K goes ahead: the tile whose V comes next
    const auto copy_last_v = [&] {
      barrier_wait(map.v_empty(ring_v.stage()), ring_v.parity() ^ 1U);
      __syncwarp();
      if (lane == 0) copy_v(last, ring_v.stage());
      ring_v.advance();
    };
    // Thirty-two tiles are looked up at a time, a lane each, one batch ahead.
    TilePlace ahead{};
    if (lane < tiles) ahead = find_tile<C>(p, work, lane);
    for (int first = 0; first < tiles; first += 32) {
      const TilePlace batch = ahead;
      if (first + 32 + lane < tiles) ahead = find_tile<C>(p, work, first + 32 + lane);
      const int end = tiles - first < 32 ? tiles - first : 32;
      if (p.schedule.keep_pace) {
        if (lane == 0) {
          store_number(map.pace(), end);
          barrier_arrive(map.pace_told());
        }
        barrier_wait(map.pace_free(), paced);
        paced ^= 1U;
      }
      for (int i = 0; i < end; ++i, ring.advance()) {
        const TileBox tile{__shfl_sync(0xffffffffU, batch.source, i),
                           __shfl_sync(0xffffffffU, static_cast<int>(batch.row), i),
                           __shfl_sync(0xffffffffU, batch.keys, i)};
        if (lane == 0 && first + i == wanted) barrier_arrive(map.work_wanted());
        barrier_wait(map.k_empty(ring.stage()), ring.parity() ^ 1U);
        __syncwarp();  // all lanes have passed it before its next turn can come
        if constexpr (C::kKeysAhead) {
          if (lane == 0) copy_k(tile, ring.stage());
          if (first + i > 0) copy_last_v();
          last = tile;
        } else {
          if (lane == 0) copy_k(tile, ring.stage());
          __syncwarp();
          if (lane == 0) copy_v(tile, ring.stage());
        }
      }
    }
    if (C::kKeysAhead && tiles > 0) copy_last_v();
    barrier_arrive(map.q_empty(round.stage()));
  }
  if (lane == 0) {
    if (p.schedule.keep_pace) {
      store_number(map.pace(), -1);
      barrier_arrive(map.pace_told());
    }
    if (tails > 0) barrier_wait(map.tail_done(), (tails - 1) & 1U);
    store_number(map.tail(), -1);
    barrier_arrive(map.tail_told());
  }
}

// Makes zeros of the rows of a V tile that lie past its sequence's end, before the consumers hear of it.
template <class C>
__device__ __forceinline__ void clear_tails(const SharedMap<C>& map) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    barrier_wait(map.tail_told(), parity);
    const int stage = load_number(map.tail());
    const int rows = load_number(map.tail() + 4);
    if (stage < 0) return;
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
    if constexpr (C::kWalkCtas > 1) barrier_arrive_at(in_cta(map.tail_done(), rank_in_cluster() ^ 1U));
  }
}

}  // namespace ringattn::sm90
