// SPDX-License-Identifier: Apache-2.0
// The warps that bring work: one decides what comes next, one has the copy engine fetch query and key tiles, one clears
// what a value tile holds past its sequence's end.
#pragma once

#include "kernels/cuda/work_order.cuh"
#include "kernels/sm90/hopper_params.hpp"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/shared_map.cuh"

namespace ringattn::sm90 {

// What a unit's rows see of its tiles, and which of those need no more than the plain steps: where all rows see all
// keys, and no group ends. Where the first row's keys end and the last row's begin decides. `first` is the number of
// its first tile; tiles of several runs are not looked at one by one.
template <class C>
__device__ __forceinline__ void set_edges(const cuda::FoldParams& p, const cuda::WorkItem& item, std::int64_t first,
                                          bool one_run, UnitWork& unit) {
  const int tiles = unit.end - unit.begin;
  const std::int64_t origin = first * C::kKeyTile;
  const auto edge = [&](std::int64_t key) {
    const std::int64_t from_origin = key - origin;
    return static_cast<int>(from_origin < -kNoEdge ? -kNoEdge : from_origin > kNoEdge ? kNoEdge : from_origin);
  };
  unit.origin = static_cast<int>(first);
  unit.from = p.mask_left < 0 ? -kNoEdge : edge(item.position - p.mask_left);
  unit.to = p.mask_right < 0 ? kNoEdge : edge(item.position + p.mask_right + 1);
  unit.length = edge(item.key_length);

  const auto tiles_before = [](int key) { return key < 0 ? 0 : key / C::kKeyTile; };
  const int plain_begin = p.mask_left < 0 ? 0 : tiles_before(unit.from + kQueryTile - 1 + C::kKeyTile - 1);
  const int plain_end = tiles_before(unit.to < unit.length ? unit.to : unit.length);
  unit.head = tiles - (plain_begin < tiles ? plain_begin : tiles);
  unit.tail = one_run ? tiles - (plain_end < tiles ? plain_end : tiles) : tiles;
  if (p.save && (first + tiles) % kSumTiles == 0 && unit.tail == 0) unit.tail = 1;  // consume() looks at it
  unit.group = static_cast<int>((first + tiles) % kSumTiles);
}

// So many tiles of a round are still to be fetched when the next one is taken, at most: early enough for its tables and
// its Q, late enough that CTAs end together. What is taken sooner, nobody can take who is done sooner.
inline constexpr int kTilesAhead = 4;

// A CTA that is nearly done with a round takes what comes next (work_order.cuh).
template <class C>
__device__ __forceinline__ void schedule(const HopperParams& params, const SharedMap<C>& map, unsigned char* shared) {
  const cuda::FoldParams& p = params.fold;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.heads / p.kv_heads;
  const int all_work = p.bundle_count * p.kv_heads;
  RingCursor<C::kRounds> cursor;
  int tiles = 0;             // of the round before
  std::uint32_t wanted = 0;  // parity
  for (int round = 0;; ++round, cursor.advance()) {
    int index = static_cast<int>(blockIdx.x);
    if (round > 0) {
      if (tiles > kTilesAhead) {
        barrier_wait(map.work_wanted(), wanted);
        wanted ^= 1U;
      }
      if (lane == 0) {
        const int taken = atomicAdd(p.taken, 1);
        // Each CTA takes once more than there is, so this one is the last of all. The next task may find the same
        // tables.
        if (taken == all_work - 1) atomicExch(p.taken, 0);
        index = static_cast<int>(gridDim.x) + taken;
      }
      index = __shfl_sync(0xffffffffU, index, 0);
    }
    BundleWork* const work = work_of<C>(shared, cursor.stage());
    UnitWork* const units = units_of<C>(shared, cursor.stage());
    if (round >= C::kRounds) barrier_wait(map.q_empty(cursor.stage()), cursor.parity() ^ 1U);
    const bool any = index < all_work;
    if (any) {
      const cuda::WorkPlace place = cuda::work_place(p, p.kv_heads, p.section_heads / group, index);
      const cuda::WorkBundle& bundle = p.bundles[place.piece];
      const int kv_head = place.head;
      tiles = bundle.tiles;
      if (lane < C::kUnits) {
        UnitWork unit{};
        unit.walk = bundle.tiles;
        if (lane < bundle.units) {
          const int in_group = bundle.head + lane;
          const cuda::WorkItem& item = p.items[bundle.item + in_group / group];
          unit.row = item.row;
          unit.first = item.first;
          unit.run_begin = item.run_begin;
          unit.runs = item.runs;
          unit.slot_begin = item.slot_begin;
          unit.slot_end = item.slot_end;
          unit.query_head = kv_head * group + in_group % group;
          if (item.tiles > 0) {
            unit.begin = static_cast<int>(item.first - bundle.first);
            unit.end = unit.begin + item.tiles;
            set_edges<C>(p, item, item.first_tile, item.runs == 1, unit);
          }
        }
        units[lane] = unit;
      }
      if (lane == 0) {
        work->first = bundle.first;
        work->first_tile = bundle.first_tile;
        work->table = bundle.table;
        work->key_length = p.items[bundle.item].key_length;
        work->run_begin = bundle.run_begin;
        work->runs = bundle.runs;
        work->kv_head = kv_head;
        work->units = bundle.units;
        work->tiles = bundle.tiles;
      }
    } else {
      if (lane < C::kUnits) units[lane].walk = -1;
      if (lane == 0) work->tiles = -1;
    }
    barrier_arrive(map.work_full(cursor.stage()));
    if (!any) return;
  }
}

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
    const cuda::RunEntry& entry = find_run(p.runs + work.run_begin, work.runs, number);
    tile = entry.first_tile + number - entry.first;
    index = entry.table + number - entry.first;
  }
  const cuda::TileEntry& entry = p.tiles[index];
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

template <class C>
__device__ __forceinline__ void fetch(const HopperParams& params, const SharedMap<C>& map, unsigned char* shared) {
  using Map = SharedMap<C>;
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
    // Of one lane: the copies of a tile's K, and of its V.
    const auto copy_k = [&](const TileBox& tile, std::uint32_t stage) {
      barrier_arrive_expect(map.k_full(stage), C::kKBytes);
#pragma unroll
      for (int column = 0; column < C::kDim; column += C::kBoxColumns) {
        load_box(map.k(stage) + static_cast<std::uint32_t>(column / kPanelColumns * Map::kTilePanel),
                 &params.k[tile.source], map.k_full(stage), column, kv_head, tile.row);
      }
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
#pragma unroll
      for (int column = 0; column < C::kDimV; column += C::kBoxColumnsV) {
        load_box(map.v(stage) + static_cast<std::uint32_t>(column / kPanelColumns * Map::kTilePanel),
                 &params.v[tile.source], landed, column, kv_head, tile.row);
      }
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
      if (p.keep_pace) {
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
        if (lane == 0 && first + i == tiles - kTilesAhead - 1) barrier_arrive(map.work_wanted());
        barrier_wait(map.k_empty(ring.stage()), ring.parity() ^ 1U);
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
    if (p.keep_pace) {
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
  }
}

}  // namespace ringattn::sm90
