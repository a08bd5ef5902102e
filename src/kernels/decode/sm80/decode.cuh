// SPDX-License-Identifier: Apache-2.0
// Decode on tensor cores through mma.sync, bitwise equal to prefill: the kernel for plain caches, with or without
// column slices of O, and its launch. A CTA takes work tiles, each one KV split for the rows of one KV head, and runs
// prefill's tile step: the same functions on the same fragments in the same order. Only the addresses of rows, tiles
// and results differ.
#pragma once

#include "base/cuda.hpp"
#include "kernels/attention/sm80/sliced/tile_step.cuh"
#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/decode/sm80/decode_common.cuh"
#include "kernels/decode/sm80/sm80_decode.hpp"

namespace ringattn::sm80 {

// A decode work tile with column slices of O: the prefill's tile step (attention/sm80/sliced/tile_step.cuh) on keys of
// a cache.

template <class C>
struct ColumnSliceDecodeLayout {
  static constexpr int kPages = ColumnSliceLayout<C>::kBytes;
  static constexpr int kBytes = kPages + C::kPages * 4;

  __device__ static std::int32_t* pages(unsigned char* shared) {
    return reinterpret_cast<std::int32_t*>(shared + kPages);
  }
};

// The `Keys` of attention/sm80/sliced/tile_step.cuh for a plain cache.
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
__device__ __forceinline__ void decode_sliced_tile(const WorkTileParams& p, const DecodeWorkTile& work_tile,
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

// A decode work tile whose rows each belong to one warp, which holds all of their columns of O.

template <class C>
struct DecodeLayout {
  static constexpr int kQBytes = cuda::kTileBytes<C::kQueryTile, C::kDim>;
  static constexpr int kKBytes = cuda::kTileBytes<C::kKeyTile, C::kDim>;
  static constexpr int kVBytes = cuda::kTileBytes<C::kKeyTile, C::kDimV>;
  static constexpr int kPages = kQBytes + C::kStages * (kKBytes + kVBytes);
  static constexpr int kBytes = kPages + C::kPages * 4;
};

template <class C>
__device__ __forceinline__ void decode_work_tile(const DecodeParams& p, const DecodeWorkTile& work_tile,
                                                 unsigned char* shared) {
  using Layout = DecodeLayout<C>;
  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  auto* const pages = reinterpret_cast<std::int32_t*>(shared + Layout::kPages);
  const auto copy_k = [&](int tile, std::uint32_t stage) {
    copy_keys<C, C::kDim>(p, p.k, work_tile, pages, tile, k_tiles + stage * Layout::kKBytes);
  };
  const auto copy_v = [&](int tile, std::uint32_t stage) {
    copy_keys<C, C::kDimV>(p, p.v, work_tile, pages, tile, v_tiles + stage * Layout::kVBytes);
  };
  const int end = work_tile.end;
  if (work_tile.begin < end) {
    copy_queries<C>(p, work_tile, q_tile);
    load_pages<C>(p, work_tile, pages);
    __syncthreads();
    copy_k(work_tile.begin, 0);
    if constexpr (C::kStages > 1) copy_v(work_tile.begin, 0);
    cuda::copy_commit();
  }

  AttentionState<C> state;
  for_each_row<C>([&](int block, int half, int) { begin_split(state, block, half); });
  // Only warps with rows compute.
  const bool has_rows = static_cast<int>(threadIdx.x) / 32 * 16 < work_tile.tile_rows;
  const TileStep<C, DecodeRows> step(p.attention, {work_tile, p.ratio}, q_tile);
  const int whole = work_tile.whole;
  const int whole_end = work_tile.whole_end;
  std::uint32_t stage = 0;
#pragma unroll 1
  for (int tile = work_tile.begin; tile < end; ++tile) {
    const bool masked = tile < whole || tile >= whole_end;
    const auto first_key = [tile] { return std::int64_t{tile} * C::kKeyTile; };
    const std::uint32_t k_tile = k_tiles + stage * Layout::kKBytes;
    const std::uint32_t v_tile = v_tiles + stage * Layout::kVBytes;
    cuda::copy_wait<0>();
    __syncthreads();
    if constexpr (C::kStages > 1) {
      // The tile has arrived, and all warps are done with the previous one.
      stage ^= 1U;
      if (tile + 1 < end) {
        copy_k(tile + 1, stage);
        copy_v(tile + 1, stage);
      }
      cuda::copy_commit();
      if (has_rows) step.attend(state, k_tile, v_tile, masked, first_key, [] {});
    } else {
      // The tile's K has arrived, and all warps are done with V of the previous tile.
      copy_v(tile, stage);
      cuda::copy_commit();
      const auto between = [&] {
        cuda::copy_wait<0>();
        __syncthreads();  // V has arrived, and all warps are done with K
        if (tile + 1 < end) copy_k(tile + 1, stage);
        cuda::copy_commit();
      };
      if (has_rows) {
        step.attend(state, k_tile, v_tile, masked, first_key, between);
      } else {
        between();
      }
    }
  }

  store_partials<C>(p, work_tile, state);
  if (p.finish) merge_if_last<C>(p, work_tile);
}

// Bytes of shared memory that a CTA uses in addition to its work tile.
template <class C>
constexpr int decode_layout_bytes() {
  if constexpr (C::kSlices > 1) {
    return ColumnSliceDecodeLayout<C>::kBytes;
  } else {
    return DecodeLayout<C>::kBytes;
  }
}
// Dynamic shared memory of a CTA.
template <class C>
inline constexpr int kDecodeLaunchBytes = cuda::aligned_shared_bytes(decode_layout_bytes<C>(), cuda::kPanelRowBytes);

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ unsigned char dynamic_shared[];
  unsigned char* const shared = cuda::aligned_shared<cuda::kPanelRowBytes>(dynamic_shared);
  __shared__ DecodeWorkTile work_tile;
  WorkTileFinder<C> work_tile_finder(p);
  for (int n = static_cast<int>(blockIdx.x);; n += static_cast<int>(gridDim.x)) {
    if (threadIdx.x < 32) work_tile_finder.find(n, work_tile);
    __syncthreads();
    if (work_tile.tile_rows == 0) return;
    if constexpr (C::kSlices > 1) {
      std::int32_t* const pages = ColumnSliceDecodeLayout<C>::pages(shared);
      const CachedKeys<C> keys{p, work_tile, pages};
      decode_sliced_tile<C>(p, work_tile, shared, pages, keys);
    } else {
      decode_work_tile<C>(p, work_tile, shared);
    }
    __syncthreads();  // all threads are done with the work tile and with its KV tiles
  }
}

// Turns a configuration into a decode kernel and its launch. kernels/instances.cmake lists its instantiations.

template <class Element_, AttentionConfig kAttention>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kDim = kAttention.head_dim;
  static constexpr int kDimV = kAttention.head_dim_v;
  static constexpr int kKeyTile = kAttention.key_tile;
  // Rows of one prefill query tile attend to the same KV tiles.
  static constexpr int kPrefillTile = kAttention.query_tile();
  static constexpr int kQueryTile = decode_rows(kAttention);
  static constexpr int kRowBlocks = kAttention.slices > 1 ? kAttention.rows_of_warp / 16 : 1;  // of 16 rows, per warp
  static constexpr int kThreads = decode_threads(kAttention);
  static constexpr int kStages = decode_stages(kAttention);
  static constexpr int kPages = decode_pages(kAttention);
  static constexpr int kCtas = kAttention.slices > 1 ? kAttention.ctas : 2;
  static constexpr int kColumnsAtOnce = kAttention.slices > 1         ? kAttention.columns_at_once
                                        : kAttention.head_dim_v > 128 ? 1
                                                                      : 2;
  static constexpr bool kEndBasicBlock = kAttention.end_basic_block;
  static constexpr bool kPositions = false;
  static constexpr int kSlices = kAttention.slices;
};

// `kernel` decodes plain or compressed caches.
template <class Element, AttentionConfig kAttention, class Params>
int prepare_decode(void (*kernel)(Params)) {
  using C = DecodeConfig<Element, kAttention>;
  constexpr int kBytes = kDecodeLaunchBytes<C>;
  static_assert(decode_layout_bytes<C>() == decode_bytes(kAttention, C::kStages));
  static_assert(kBytes + 256 <= kMaxSharedBytes);
  static_assert(sizeof(DecodeWorkTile) <= 256);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  int ctas = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, C::kThreads, kBytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return ctas;
}

template <class Element, AttentionConfig kAttention, class Params>
void launch_decode(void (*kernel)(Params), const Params& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kAttention>;
  kernel<<<static_cast<unsigned>(ctas), C::kThreads, kDecodeLaunchBytes<C>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention's decode");
}

template <class Element, AttentionConfig kAttention>
constexpr DecodeLauncher decode_launcher() {
  using C = DecodeConfig<Element, kAttention>;
  return {[] { return prepare_decode<Element, kAttention>(decode_kernel<C>); },
          [](const DecodeParams& params, int ctas, Stream stream) {
            launch_decode<Element, kAttention>(decode_kernel<C>, params, ctas, stream);
          }};
}

}  // namespace ringattn::sm80
