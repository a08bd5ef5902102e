// SPDX-License-Identifier: Apache-2.0
// The fold on tensor cores through mma.sync for many columns of O, which the warps of a CTA hold in slices
// (tile_step.cuh). All else is as in ../fold.cuh: one CTA folds the key tiles of one query tile of one head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/work_order.hpp"
#include "kernels/sm80/rows.cuh"
#include "kernels/sm80/sliced/tile_step.cuh"
#include "kernels/sm80/tile_map.cuh"

namespace ringattn::sm80 {

// The keys of a work item's tiles, row by row.
template <class C>
struct MappedKeys {
  const TileMap<C>& map;

  __device__ __forceinline__ FoundRow k_row(int tile, int row) const { return found(tile, row, offsetof(Place, k)); }
  __device__ __forceinline__ FoundRow v_row(int tile, int row) const { return found(tile, row, offsetof(Place, v)); }

 private:
  // Piece by piece, K or V lie `offset` bytes into the place of the piece.
  __device__ __forceinline__ FoundRow found(int tile, int row, std::uint32_t offset) const {
    const int log = map.piece_log();
    const std::uint32_t place = map.place(tile) + static_cast<std::uint32_t>((row >> log) * kPlaceBytes);
    const cuda::RowsOf rows = load_rows(place + offset, place + offset + 8);
    const int in_piece = row & ((1 << log) - 1);
    const bool present = in_piece < cuda::load_shared_number(place + 40);
    return {rows.at(present ? in_piece : 0), present, rows.aligned()};
  }
};

template <class C>
struct SlicedFoldLayout {
  static constexpr int kPlaces = SlicedLayout<C>::kBytes;
  static constexpr int kBytes = kPlaces + sm80::kPlaces * kPlaceBytes;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    sliced_fold_kernel(const __grid_constant__ cuda::FoldParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ cuda::WorkItem item;

  const cuda::WorkPlace place = cuda::work_place(p.schedule.early_count, p.schedule.piece_heads,
                                                 p.schedule.section_heads, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) item = p.tables.items[place.piece];
  __syncthreads();
  const int head = item.head + place.head;

  const std::uint32_t q_tile = cuda::shared_address(shared);
  const TileMap<C> map{p, item, reinterpret_cast<Place*>(shared + SlicedFoldLayout<C>::kPlaces),
                       head / (p.heads / p.kv_heads)};
  const MappedKeys<C> keys{map};
  const SlicedStep<C, ItemRows> step(p, {item}, shared);
  StripStages<C> stages;
  const int tiles = item.tiles;
  map.resolve(0, kPlaces);
  __syncthreads();
  if (tiles > 0) {
    const char* q = static_cast<const char*>(p.q.data) + 2 * (item.row * p.q.token_stride + head * p.q.head_stride);
    cuda::copy_tile<C::kQueryTile, C::kDim, C::kThreads>(q_tile, {q, 2 * p.q.token_stride}, item.slot_begin,
                                                         item.slot_end);
    step.start(stages, keys, 0);
  }

  RowState<C> state;
  Groups groups;
  load_state<C>(p, item, head, state, groups);

  for (int i = 0; i < tiles;) {
    // An item's tiles have consecutive places, so what is open when a group begins is another's.
    const int of_group = static_cast<int>((static_cast<std::uint32_t>(item.place) + i) % kGroupTiles);
    if (of_group == 0 && groups.open) close_group<C>(p, item, head, state, groups);
    groups.open = true;
    const int end = min(tiles, i + kGroupTiles - of_group);
#pragma unroll 1
    for (; i < end; ++i) {
      // Nobody reads addresses of tiles before this one any more.
      map.resolve_ahead(i + 1);
      step.fold(state, stages, keys, i, i + 1 < tiles, map.masked(i), [&] { return load_key(map.place(i) + 32); });
    }
  }

  __syncthreads();  // without tiles, too, every warp has loaded its rows before one saves them
  if (p.state.save) save_state<C>(p, item, head, state, groups);
  if (p.finish) {
    if (groups.closed) join_closed<C>(p, item, head, state, groups);
    finish_rows<C>(p, item, head, q_tile, state);
  }
  give_back<C>(p, groups);
}

}  // namespace ringattn::sm80
