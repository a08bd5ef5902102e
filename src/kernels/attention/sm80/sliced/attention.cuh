// SPDX-License-Identifier: Apache-2.0
// sm80_attention for wide head dims (512, 576): the kernel and its launch. The warps of a CTA hold column slices of O
// (sliced/tile_step.cuh). Otherwise as attention.cuh: one CTA computes one query tile of one head and loops over its KV
// tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cuda.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm80/config.hpp"
#include "kernels/attention/sm80/sliced/tile_step.cuh"
#include "kernels/attention/sm80/sm80_attention.hpp"
#include "kernels/attention/sm80/tile_map.cuh"
#include "kernels/attention/sm80/tile_step.cuh"
#include "kernels/common/cuda/aligned_shared.hpp"

namespace ringattn::sm80 {

// Locates the keys of a work tile's KV tiles, row by row.
template <class C>
struct MappedKeys {
  const TileMap<C>& map;

  __device__ __forceinline__ RowAddress k_row(int tile, int row) const {
    return row_address(tile, row, offsetof(TileAddress, k));
  }
  __device__ __forceinline__ RowAddress v_row(int tile, int row) const {
    return row_address(tile, row, offsetof(TileAddress, v));
  }

 private:
  // `offset`: of k or v in a TileAddress.
  __device__ __forceinline__ RowAddress row_address(int tile, int row, std::uint32_t offset) const {
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
struct ColumnSliceAttentionLayout {
  static constexpr int kTileAddresses = ColumnSliceLayout<C>::kBytes;
  static constexpr int kBytes = kTileAddresses + sm80::kTileAddresses * kTileAddressBytes;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    sliced_attention_kernel(const __grid_constant__ cuda::AttentionParams p) {
  extern __shared__ unsigned char dynamic_shared[];
  unsigned char* const shared = cuda::aligned_shared<cuda::kPanelRowBytes>(dynamic_shared);
  __shared__ cuda::WorkTile work_tile;

  const cuda::WorkIndex work_index = cuda::work_index(p.schedule.early_entries, p.schedule.entry_heads,
                                                      p.schedule.swizzle_heads, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) work_tile = p.tables.work_tiles[work_index.entry];
  __syncthreads();
  const int head = work_tile.head + work_index.head;

  const std::uint32_t q_tile = cuda::shared_address(shared);
  const TileMap<C> map{p, work_tile,
                       reinterpret_cast<TileAddress*>(shared + ColumnSliceAttentionLayout<C>::kTileAddresses),
                       head / (p.heads / p.kv_heads)};
  const MappedKeys<C> keys{map};
  const ColumnSliceStep<C, WorkTileRows> step(p, {work_tile}, shared);
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
    // A work tile's tiles have consecutive indices, so the current partial at a split's first tile belongs to the split
    // before.
    const int tile_in_split =
        static_cast<int>((static_cast<std::uint32_t>(work_tile.split_position) + i) % kTilesPerKvSplit);
    if (tile_in_split == 0 && held.current) merge_current_split<C>(p, work_tile, head, state, held);
    held.current = true;
    const int end = min(tiles, i + kTilesPerKvSplit - tile_in_split);
#pragma unroll 1
    for (; i < end; ++i) {
      // No thread reads addresses of earlier tiles any more.
      map.resolve_ahead(i + 1);
      step.attend(state, stages, keys, i, i + 1 < tiles, map.masked(i),
                  [&] { return load_key(map.tile_address(i) + 32); });
    }
  }

  __syncthreads();  // also without tiles, every warp must have loaded its rows before one saves them
  if (p.state.save) save_attention_state<C>(p, work_tile, head, state, held);
  if (p.finish) {
    if (held.merged) add_merged<C>(p, work_tile, head, state, held);
    finish_rows<C>(p, work_tile, head, q_tile, state);
  }
  release_scratch<C>(p, held);
}

// Turns a configuration with slices into a kernel and its launch. kernels/instances.cmake lists its instantiations.

// Dynamic shared memory of a CTA.
template <class C>
inline constexpr int kSlicedLaunchBytes = cuda::aligned_shared_bytes(ColumnSliceAttentionLayout<C>::kBytes,
                                                                     cuda::kPanelRowBytes);

template <class Element, AttentionConfig kConfig>
void prepare_sliced_attention() {
  using C = KernelConfig<Element, kConfig>;
  constexpr int kBytes = ColumnSliceAttentionLayout<C>::kBytes;
  // With the work tile at most 99 KiB, which every device from sm_80 on provides per CTA.
  static_assert(ColumnSliceLayout<C>::kBytes == kConfig.sliced_bytes() && kBytes == kConfig.shared_bytes());
  static_assert(kSlicedLaunchBytes<C> + 128 <= 99 * 1024);
  check_cuda(cudaFuncSetAttribute(sliced_attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kSlicedLaunchBytes<C>),
             "cudaFuncSetAttribute");
}

template <class Element, AttentionConfig kConfig>
void launch_sliced_attention(const cuda::AttentionParams& params, Stream stream) {
  using C = KernelConfig<Element, kConfig>;
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  sliced_attention_kernel<C><<<blocks, C::kThreads, kSlicedLaunchBytes<C>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention");
}

template <class Element, AttentionConfig kConfig>
constexpr cuda::Launcher sliced_launcher_of() {
  return {prepare_sliced_attention<Element, kConfig>, launch_sliced_attention<Element, kConfig>};
}

}  // namespace ringattn::sm80
