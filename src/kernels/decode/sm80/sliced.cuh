// SPDX-License-Identifier: Apache-2.0
// A decode work tile with column slices of O: the prefill's tile step (../sliced/tile_step.cuh) on keys of a cache.
#pragma once

#include "kernels/attention/sm80/sliced/tile_step.cuh"
#include "kernels/decode/sm80/fetch.cuh"
#include "kernels/decode/sm80/finish.cuh"

namespace ringattn::sm80 {

template <class C>
struct ColumnSliceDecodeLayout {
  static constexpr int kPages = ColumnSliceLayout<C>::kBytes;
  static constexpr int kBytes = kPages + C::kPages * 4;

  __device__ static std::int32_t* pages(unsigned char* shared) {
    return reinterpret_cast<std::int32_t*>(shared + kPages);
  }
};

// The `Keys` of sliced/strips.cuh for a plain cache.
template <class C>
struct CachedKeys {
  const DecodeParams& p;
  const DecodeWorkTile& work_tile;
  const std::int32_t* pages;

  __device__ __forceinline__ RowAddress k_row(int tile, int row) const { return row_address(p.k, tile, row); }
  __device__ __forceinline__ RowAddress v_row(int tile, int row) const { return row_address(p.v, tile, row); }

 private:
  __device__ __forceinline__ RowAddress row_address(const DecodeCache& cache, int tile, int row) const {
    const CachedRow at = cached_row<C>(p, cache, work_tile, pages, tile, row);
    return {at.data, at.present, /*aligned=*/true};
  }
};

// Fills `pages`, in shared memory, from which `keys` reads.
template <class C, class Keys>
__device__ __forceinline__ void decode_sliced_tile(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                   unsigned char* shared, std::int32_t* pages, Keys& keys) {
  const ColumnSliceStep<C, DecodeRows> step(p.attention, {work_tile, p.ratio}, shared);
  StripStages<C> stages;
  const int end = work_tile.end;
  if (work_tile.begin < end) {
    copy_queries<C>(p, work_tile, cuda::shared_address(shared));
    load_pages<C>(p, work_tile, pages);
    __syncthreads();
    step.start(stages, keys, work_tile.begin);
  }

  AttentionState<C> state;
  for_each_row<C>([&](int block, int half, int) { begin_split(state, block, half); });
  const int whole = work_tile.whole;
  const int whole_end = work_tile.whole_end;
#pragma unroll 1
  for (int tile = work_tile.begin; tile < end; ++tile) {
    const bool masked = tile < whole || tile >= whole_end;
    step.attend(state, stages, keys, tile, tile + 1 < end, masked, [tile] { return std::int64_t{tile} * C::kKeyTile; });
  }

  store_partials<C>(p, work_tile, state);
  if (p.finish) merge_if_last<C>(p, work_tile);
}

}  // namespace ringattn::sm80
