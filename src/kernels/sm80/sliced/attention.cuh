// SPDX-License-Identifier: Apache-2.0
// The fold on tensor cores through mma.sync for many columns of O, which the warps of a CTA hold in slices
// (tile_step.cuh). All else is as in ../attention.cuh: one CTA folds the key tiles of one query tile of one head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/work_order.hpp"
#include "kernels/sm80/row_state.cuh"
#include "kernels/sm80/sliced/tile_step.cuh"
#include "kernels/sm80/tile_map.cuh"

namespace ringattn::sm80 {

// The keys of a work work_tile's tiles, row by row.
template <class C>
struct MappedKeys {
  const TileMap<C>& map;

  __device__ __forceinline__ FoundRow k_row(int tile, int row) const {
    return found(tile, row, offsetof(TileAddress, k));
  }
  __device__ __forceinline__ FoundRow v_row(int tile, int row) const {
    return found(tile, row, offsetof(TileAddress, v));
  }

 private:
  // Piece by piece, K or V lie `offset` bytes into the tile_address of the piece.
  __device__ __forceinline__ FoundRow found(int tile, int row, std::uint32_t offset) const {
    const int log = map.page_run_log2();
    const std::uint32_t tile_address =
        map.tile_address(tile) + static_cast<std::uint32_t>((row >> log) * kTileAddressBytes);
    const cuda::RowsOf rows = load_rows(tile_address + offset, tile_address + offset + 8);
    const int in_page_run = row & ((1 << log) - 1);
    const bool present = in_page_run < cuda::load_shared_number(tile_address + 40);
    return {rows.at(present ? in_page_run : 0), present, rows.aligned()};
  }
};

template <class C>
struct SlicedAttentionLayout {
  static constexpr int kTileAddresses = SlicedLayout<C>::kBytes;
  static constexpr int kBytes = kTileAddresses + sm80::kTileAddresses * kTileAddressBytes;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    sliced_attention_kernel(const __grid_constant__ cuda::AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ cuda::WorkTile work_tile;

  const cuda::WorkIndex work_index = cuda::work_index(p.schedule.early_entries, p.schedule.entry_heads,
                                                      p.schedule.swizzle_heads, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) work_tile = p.tables.work_tiles[work_index.entry];
  __syncthreads();
  const int head = work_tile.head + work_index.head;

  const std::uint32_t q_tile = cuda::shared_address(shared);
  const TileMap<C> map{p, work_tile, reinterpret_cast<TileAddress*>(shared + SlicedAttentionLayout<C>::kTileAddresses),
                       head / (p.heads / p.kv_heads)};
  const MappedKeys<C> keys{map};
  const SlicedStep<C, WorkTileRows> step(p, {work_tile}, shared);
  StripStages<C> stages;
  const int tiles = work_tile.tiles;
  map.resolve(0, kTileAddresses);
  __syncthreads();
  if (tiles > 0) {
    const char* q =
        static_cast<const char*>(p.q.data) + 2 * (work_tile.row * p.q.token_stride + head * p.q.head_stride);
    cuda::copy_tile<C::kQueryTile, C::kDim, C::kThreads>(q_tile, {q, 2 * p.q.token_stride}, work_tile.valid_row_begin,
                                                         work_tile.valid_row_end);
    step.start(stages, keys, 0);
  }

  AttentionState<C> state;
  HeldPartials held;
  load_attention_state<C>(p, work_tile, head, state, held);

  for (int i = 0; i < tiles;) {
    // An work_tile's tiles have consecutive tile_addresses, so what is current when a group begins is another's.
    const int of_group =
        static_cast<int>((static_cast<std::uint32_t>(work_tile.split_position) + i) % kTilesPerKvSplit);
    if (of_group == 0 && held.current) merge_current_split<C>(p, work_tile, head, state, held);
    held.current = true;
    const int end = min(tiles, i + kTilesPerKvSplit - of_group);
#pragma unroll 1
    for (; i < end; ++i) {
      // Nobody reads addresses of tiles before this one any more.
      map.resolve_ahead(i + 1);
      step.attend(state, stages, keys, i, i + 1 < tiles, map.masked(i),
                  [&] { return load_key(map.tile_address(i) + 32); });
    }
  }

  __syncthreads();  // without tiles, too, every warp has loaded its rows before one saves them
  if (p.state.save) save_attention_state<C>(p, work_tile, head, state, held);
  if (p.finish) {
    if (held.merged) add_merged<C>(p, work_tile, head, state, held);
    finish_rows<C>(p, work_tile, head, q_tile, state);
  }
  release_scratch<C>(p, held);
}

}  // namespace ringattn::sm80
