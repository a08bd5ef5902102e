// SPDX-License-Identifier: Apache-2.0
// Decode from a compressed cache. Work tiles, KV tiles and tile steps are those of decode.cuh. The threads of a CTA
// dequantize a tile (compressed_fetch.cuh) instead of copying it, so a stage is complete at the next barrier. Warps
// without rows, which most decode steps have, dequantize a tile while the others compute the one before it.
#pragma once

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/decode/sm80/compressed_fetch.cuh"
#include "kernels/decode/sm80/compressed_latents.cuh"
#include "kernels/decode/sm80/decode.cuh"

namespace ringattn::sm80 {

template <class C>
__device__ __forceinline__ void decode_compressed_tile(const CompressedParams& params, const DecodeWorkTile& work_tile,
                                                       unsigned char* shared) {
  using Layout = DecodeLayout<C>;
  const DecodeParams& p = params.step;
  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  auto* const pages = reinterpret_cast<std::int32_t*>(shared + Layout::kPages);
  const auto dequantize_k = [&](int tile, std::uint32_t target) {
    TileDequantizer<C, C::kDim>(p, params.k, work_tile, pages, tile, target).dequantize();
  };
  const auto dequantize_v = [&](int tile, std::uint32_t target) {
    TileDequantizer<C, C::kDimV>(p, params.v, work_tile, pages, tile, target).dequantize();
  };
  const int end = work_tile.end;
  if (work_tile.begin < end) {
    copy_queries<C>(p, work_tile, q_tile);
    load_pages<C>(p, work_tile, pages);
  }
  cuda::copy_commit();

  AttentionState<C> state;
  for_each_row<C>([&](int block, int half, int) { begin_split(state, block, half); });
  const bool has_rows = static_cast<int>(threadIdx.x) / 32 * 16 < work_tile.tile_rows;
  const TileStep<C, DecodeRows> step(p.attention, {work_tile, p.ratio}, q_tile);
  const int whole = work_tile.whole;
  const int whole_end = work_tile.whole_end;
  std::uint32_t stage = 0;
  // The first iteration precedes the first tile and attends to none, so that the dequantization code is emitted once.
#pragma unroll 1
  for (int tile = work_tile.begin - 1; tile < end; ++tile) {
    const bool attends = tile >= work_tile.begin && has_rows;
    const bool masked = tile < whole || tile >= whole_end;
    const auto first_key = [tile] { return std::int64_t{tile} * C::kKeyTile; };
    cuda::copy_wait<0>();  // for the queries, before the first tile
    __syncthreads();
    if constexpr (C::kStages > 1) {
      // The tile has arrived, and all warps are done with the one before it.
      const std::uint32_t k_tile = k_tiles + stage * Layout::kKBytes;
      const std::uint32_t v_tile = v_tiles + stage * Layout::kVBytes;
      stage ^= 1U;
      if (tile + 1 < end) {
        dequantize_k(tile + 1, k_tiles + stage * Layout::kKBytes);
        dequantize_v(tile + 1, v_tiles + stage * Layout::kVBytes);
      }
      if (attends) step.attend(state, k_tile, v_tile, masked, first_key, [] {});
    } else {
      // The tile's K has arrived, and all warps are done with V of the one before it.
      if (tile >= work_tile.begin) dequantize_v(tile, v_tiles);
      const auto between = [] { __syncthreads(); };  // V has arrived, and all warps are done with K
      if (attends) {
        step.attend(state, k_tiles, v_tiles, masked, first_key, between);
      } else {
        between();
      }
      if (tile + 1 < end) dequantize_k(tile + 1, k_tiles);
    }
  }

  store_partials<C>(p, work_tile, state);
  if (p.finish) merge_if_last<C>(p, work_tile);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    compressed_kernel(const __grid_constant__ CompressedParams params) {
  extern __shared__ unsigned char dynamic_shared[];
  unsigned char* const shared = cuda::aligned_shared<cuda::kPanelRowBytes>(dynamic_shared);
  __shared__ DecodeWorkTile work_tile;
  WorkTileFinder<C> work_tile_finder(params.step);
  for (int n = static_cast<int>(blockIdx.x);; n += static_cast<int>(gridDim.x)) {
    if (threadIdx.x < 32) work_tile_finder.find(n, work_tile);
    __syncthreads();
    if (work_tile.tile_rows == 0) return;
    if constexpr (C::kSlices > 1) {
      std::int32_t* const pages = ColumnSliceDecodeLayout<C>::pages(shared);
      LatentStrips<C> strips(params, work_tile, pages);
      decode_sliced_tile<C>(params.step, work_tile, shared, pages, strips);
    } else {
      decode_compressed_tile<C>(params, work_tile, shared);
    }
    __syncthreads();  // all threads are done with the work tile and with its KV tiles
  }
}

}  // namespace ringattn::sm80
