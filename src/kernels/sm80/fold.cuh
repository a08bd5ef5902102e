// SPDX-License-Identifier: Apache-2.0
// The fold on tensor cores through mma.sync, sm_80 and later. One CTA folds the key tiles of one query tile of one
// head, in ascending order. Every number is a function of the row, its keys, the job and the template parameters; the
// work item only says where things lie and where to stop.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/device/tile_lookup.cuh"
#include "kernels/cuda/fold_params.hpp"
#include "kernels/cuda/work_order.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/rows.cuh"
#include "kernels/sm80/tile_step.cuh"

namespace ringattn::sm80 {

// Where one head of a key tile lies, in shared memory: 48 bytes.
struct Place {
  cuda::RowsOf k;
  cuda::RowsOf v;
  std::int64_t first_key;  // position in its sequence
  std::int32_t keys;       // that the sequence has of the tile
  std::int32_t masked;     // whether some row of the query tile doesn't see some key of it
};
inline constexpr int kPlaces = 32;  // of the tile map that are held resolved: two halves, one in use, one ahead
inline constexpr int kPlaceBytes = 48;
static_assert(sizeof(Place) == kPlaceBytes && kPlaces <= 32);

template <class C>
struct SharedLayout {
  static constexpr int kQBytes = cuda::kTileBytes<C::kQueryTile, C::kDim>;
  static constexpr int kKBytes = cuda::kTileBytes<C::kKeyTile, C::kDim>;
  static constexpr int kVBytes = cuda::kTileBytes<C::kKeyTile, C::kDimV>;
  static constexpr int kPlaces = kQBytes + C::kStages * (kKBytes + kVBytes);
  static constexpr int kBytes = kPlaces + sm80::kPlaces * kPlaceBytes;
};

// Loads by explicit instructions: what the compiler loads for itself here it makes uniform, and everyone waits.
__device__ inline cuda::RowsOf load_rows(std::uint32_t data_at, std::uint32_t stride_at) {
  cuda::RowsOf rows;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.data) : "r"(data_at) : "memory");
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.stride) : "r"(stride_at) : "memory");
  return rows;
}
__device__ inline std::int32_t load_number(std::uint32_t address) {
  std::int32_t number;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(address) : "memory");
  return number;
}

// The addresses of one work item's tiles.
template <class C>
struct TileMap {
  const cuda::FoldParams& p;
  const cuda::WorkItem& item;
  Place* places;
  int kv_head;

  // Resolves entries [first, first + count) of the item, count ≤ 32; for the first warp.
  __device__ void resolve(int first, int count) const {
    const int i = first + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= count || i >= item.tiles) return;
    const auto& [tile, entry] = cuda::tile_of_walk(p.tables, item, i);
    const cuda::SourceEntry& source = cuda::source_of(p.tables, entry.source);
    Place place;
    const std::int64_t k_offset = entry.row * source.k_token_stride + kv_head * source.k_head_stride;
    const std::int64_t v_offset = entry.row * source.v_token_stride + kv_head * source.v_head_stride;
    place.k = {static_cast<const char*>(source.k) + 2 * k_offset, 2 * source.k_token_stride};
    place.v = {static_cast<const char*>(source.v) + 2 * v_offset, 2 * source.v_token_stride};
    place.first_key = tile * C::kKeyTile;
    const std::int64_t left = item.key_length - place.first_key;
    place.keys = left < C::kKeyTile ? static_cast<std::int32_t>(left) : C::kKeyTile;
    const std::int64_t last_position = item.position + C::kQueryTile - 1;
    place.masked =
        Visibility(p.mask, item.key_length).coverage(item.position, last_position, place.first_key, C::kKeyTile) !=
        Coverage::kWhole;
    places[i % kPlaces] = place;
  }

  // Called with tile numbers in order; resolves the next half where the one before it is free.
  __device__ void resolve_ahead(int next) const {
    if (next % (kPlaces / 2) == kPlaces / 4 && next > kPlaces / 2) {
      resolve(next / (kPlaces / 2) * (kPlaces / 2) + kPlaces / 2, kPlaces / 2);
    }
  }

  __device__ std::uint32_t place(int tile) const {
    return cuda::shared_address(places) + static_cast<std::uint32_t>(tile % kPlaces * kPlaceBytes);
  }
  __device__ __forceinline__ void copy_k(int tile, std::uint32_t target) const {
    const std::uint32_t at = place(tile);
    cuda::copy_tile<C::kKeyTile, C::kDim, C::kThreads>(target, load_rows(at, at + 8), 0, load_number(at + 40));
  }
  __device__ __forceinline__ void copy_v(int tile, std::uint32_t target) const {
    const std::uint32_t at = place(tile);
    cuda::copy_tile<C::kKeyTile, C::kDimV, C::kThreads>(target, load_rows(at + 16, at + 24), 0, load_number(at + 40));
  }
  __device__ bool masked(int tile) const { return load_number(place(tile) + 44) != 0; }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) fold_kernel(const __grid_constant__ cuda::FoldParams p) {
  using Layout = SharedLayout<C>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ cuda::WorkItem item;  // not in registers: most of it is wanted at both ends only

  const cuda::WorkPlace place = cuda::work_place(p.schedule.early_count, p.schedule.piece_heads,
                                                 p.schedule.section_heads, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) item = p.tables.items[place.piece];
  __syncthreads();
  const int head = item.head + place.head;

  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  const TileMap<C> map{p, item, reinterpret_cast<Place*>(shared + Layout::kPlaces), head / (p.heads / p.kv_heads)};
  const int tiles = item.tiles;
  if (tiles > 0) {
    const char* q = static_cast<const char*>(p.q.data) + 2 * (item.row * p.q.token_stride + head * p.q.head_stride);
    cuda::copy_tile<C::kQueryTile, C::kDim, C::kThreads>(q_tile, {q, 2 * p.q.token_stride}, item.slot_begin,
                                                         item.slot_end);
  }
  map.resolve(0, kPlaces);
  __syncthreads();

  const auto k_stage = [&](int i) { return k_tiles + static_cast<std::uint32_t>(i % C::kStages * Layout::kKBytes); };
  const auto v_stage = [&](int i) { return v_tiles + static_cast<std::uint32_t>(i % C::kStages * Layout::kVBytes); };
  if (tiles > 0) {
    map.copy_k(0, k_stage(0));
    if constexpr (C::kStages > 1) map.copy_v(0, v_stage(0));
  }
  cuda::copy_commit();

  RowState<C> state;
  Groups groups;
  load_state<C>(p, item, head, state, groups);

  const TileStep<C> step(p, item, q_tile);
  for (int i = 0; i < tiles;) {
    // An item's tiles have consecutive places, so what is open when a group begins is another's.
    const int of_group = static_cast<int>((static_cast<std::uint32_t>(item.place) + i) % kGroupTiles);
    if (of_group == 0 && groups.open) close_group<C>(p, item, head, state, groups);
    groups.open = true;
    const int end = min(tiles, i + kGroupTiles - of_group);
    for (; i < end; ++i) {
      cuda::copy_wait<0>();
      __syncthreads();
      if constexpr (C::kStages > 1) {
        // Tile i is here, and everyone is past tile i − 1.
        if (i + 1 < tiles) {
          map.copy_k(i + 1, k_stage(i + 1));
          map.copy_v(i + 1, v_stage(i + 1));
        }
        cuda::copy_commit();
        map.resolve_ahead(i + 1);
        step.fold(state, k_stage(i), v_stage(i), map.masked(i), map.place(i) + 32, [] {});
      } else {
        // K of tile i is here, and everyone is past V of tile i − 1.
        map.copy_v(i, v_stage(i));
        cuda::copy_commit();
        map.resolve_ahead(i + 1);
        step.fold(state, k_stage(i), v_stage(i), map.masked(i), map.place(i) + 32, [&] {
          cuda::copy_wait<0>();
          __syncthreads();  // V is here, and everyone is past K
          if (i + 1 < tiles) map.copy_k(i + 1, k_stage(i + 1));
          cuda::copy_commit();
        });
      }
    }
  }

  if (p.state.save) save_state<C>(p, item, head, state, groups);
  if (p.finish) {
    if (groups.closed) join_closed<C>(p, item, head, state, groups);
    finish_rows<C>(p, item, head, q_tile, state);
  }
  give_back<C>(p, groups);
}

}  // namespace ringattn::sm80
