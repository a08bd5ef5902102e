// SPDX-License-Identifier: Apache-2.0
// Decoding over a compressed cache: units, tiles and tile steps are those of decode.cuh. What differs is that the
// threads of a CTA make the elements of a tile of codes (compressed_fetch.cuh), so nothing is on its way to a stage
// that isn't there at the next barrier. Warps without rows, which most steps leave some, unpack a tile while the others
// fold the one before it.
#pragma once

#include "kernels/sm80/decode/compressed_fetch.cuh"
#include "kernels/sm80/decode/compressed_latents.cuh"
#include "kernels/sm80/decode/decode.cuh"

namespace ringattn::sm80 {

template <class C>
__device__ __forceinline__ void fold_compressed_unit(const CompressedParams& params, const DecodeUnit& unit,
                                                     unsigned char* shared) {
  using Layout = DecodeLayout<C>;
  const DecodeParams& p = params.step;
  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  auto* const pages = reinterpret_cast<std::int32_t*>(shared + Layout::kPages);
  const auto unpack_k = [&](int tile, std::uint32_t target) {
    TileUnpacker<C, C::kDim>(p, params.k, unit, pages, tile, target).unpack();
  };
  const auto unpack_v = [&](int tile, std::uint32_t target) {
    TileUnpacker<C, C::kDimV>(p, params.v, unit, pages, tile, target).unpack();
  };
  const int end = unit.end;
  if (unit.begin < end) {
    copy_queries<C>(p, unit, q_tile);
    load_pages<C>(p, unit, pages);
  }
  cuda::copy_commit();

  RowState<C> state;
  for_each_row<C>([&](int block, int half, int) { begin_group(state, block, half); });
  const bool has_rows = static_cast<int>(threadIdx.x) / 32 * 16 < unit.slots;
  const TileStep<C, DecodeRows> step(p.fold, {unit, p.ratio}, q_tile);
  const int whole = unit.whole;
  const int whole_end = unit.whole_end;
  std::uint32_t stage = 0;
  // The first round is in front of the first tile, and folds none: so what unpacks tiles is there once.
#pragma unroll 1
  for (int tile = unit.begin - 1; tile < end; ++tile) {
    const bool folds = tile >= unit.begin && has_rows;
    const bool masked = tile < whole || tile >= whole_end;
    const auto first_key = [tile] { return std::int64_t{tile} * C::kKeyTile; };
    cuda::copy_wait<0>();  // of queries, ahead of the first tile
    __syncthreads();
    if constexpr (C::kStages > 1) {
      // The tile is here, and everyone is past the one before it.
      const std::uint32_t k_tile = k_tiles + stage * Layout::kKBytes;
      const std::uint32_t v_tile = v_tiles + stage * Layout::kVBytes;
      stage ^= 1U;
      if (tile + 1 < end) {
        unpack_k(tile + 1, k_tiles + stage * Layout::kKBytes);
        unpack_v(tile + 1, v_tiles + stage * Layout::kVBytes);
      }
      if (folds) step.fold(state, k_tile, v_tile, masked, first_key, [] {});
    } else {
      // The tile's K is here, and everyone is past V of the one before it.
      if (tile >= unit.begin) unpack_v(tile, v_tiles);
      const auto between = [] { __syncthreads(); };  // V is here, and everyone is past K
      if (folds) {
        step.fold(state, k_tiles, v_tiles, masked, first_key, between);
      } else {
        between();
      }
      if (tile + 1 < end) unpack_k(tile + 1, k_tiles);
    }
  }

  leave_records<C>(p, unit, state);
  if (p.finish) merge_if_last<C>(p, unit);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    compressed_kernel(const __grid_constant__ CompressedParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ DecodeUnit unit;
  UnitFinder<C> finder(params.step);
  for (int n = static_cast<int>(blockIdx.x);; n += static_cast<int>(gridDim.x)) {
    if (threadIdx.x < 32) finder.find(n, unit);
    __syncthreads();
    if (unit.slots == 0) return;
    if constexpr (C::kSlices > 1) {
      std::int32_t* const pages = SlicedDecodeLayout<C>::pages(shared);
      LatentStrips<C> strips(params, unit, pages);
      fold_sliced_unit<C>(params.step, unit, shared, pages, strips);
    } else {
      fold_compressed_unit<C>(params, unit, shared);
    }
    __syncthreads();  // everybody is done with the unit, and with its tiles
  }
}

}  // namespace ringattn::sm80
