// SPDX-License-Identifier: Apache-2.0
// The fold on tensor cores through mma.sync, sm_80 and later. One CTA folds the key tiles of one query tile of one
// head, in ascending order. Every number is a function of the row, its keys, the job and the template parameters; the
// work item only says where things lie and where to stop.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/fold_params.hpp"
#include "kernels/cuda/work_order.hpp"
#include "kernels/sm80/rows.cuh"
#include "kernels/sm80/tile_map.cuh"
#include "kernels/sm80/tile_step.cuh"

namespace ringattn::sm80 {

template <class C>
struct SharedLayout {
  static constexpr int kQBytes = cuda::kTileBytes<C::kQueryTile, C::kDim>;
  static constexpr int kKBytes = cuda::kTileBytes<C::kKeyTile, C::kDim>;
  static constexpr int kVBytes = cuda::kTileBytes<C::kKeyTile, C::kDimV>;
  static constexpr int kPlaces = kQBytes + C::kStages * (kKBytes + kVBytes);
  static constexpr int kBytes = kPlaces + sm80::kPlaces * kPlaceBytes;
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

  const TileStep<C, ItemRows> step(p, {item}, q_tile);
  const auto first_key = [&](int i) { return [at = map.place(i) + 32] { return load_key(at); }; };
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
        step.fold(state, k_stage(i), v_stage(i), map.masked(i), first_key(i), [] {});
      } else {
        // K of tile i is here, and everyone is past V of tile i − 1.
        map.copy_v(i, v_stage(i));
        cuda::copy_commit();
        map.resolve_ahead(i + 1);
        step.fold(state, k_stage(i), v_stage(i), map.masked(i), first_key(i), [&] {
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
