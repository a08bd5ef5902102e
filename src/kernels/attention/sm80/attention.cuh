// SPDX-License-Identifier: Apache-2.0
// sm80_attention: attention on tensor cores through mma.sync, sm_80 and later: the kernel and its launch. One CTA
// computes one query tile of one head and loops over its KV tiles in ascending order. Results depend only on the row,
// its keys, the job and the template parameters. The work tile states addresses and the range of the KV loop, and never
// changes a bit.
#pragma once

#include <cstdint>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm80/config.hpp"
#include "kernels/attention/sm80/sm80_attention.hpp"
#include "kernels/attention/sm80/tile_map.cuh"
#include "kernels/attention/sm80/tile_step.cuh"
#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

template <class C>
struct SharedLayout {
  static constexpr int kQBytes = cuda::kTileBytes<C::kQueryTile, C::kDim>;
  static constexpr int kKBytes = cuda::kTileBytes<C::kKeyTile, C::kDim>;
  static constexpr int kVBytes = cuda::kTileBytes<C::kKeyTile, C::kDimV>;
  static constexpr int kTileAddresses = kQBytes + C::kStages * (kKBytes + kVBytes);
  static constexpr int kBytes = kTileAddresses + sm80::kTileAddresses * kTileAddressBytes;
};

// At 96 dims rounding the address up costs 1 to 2 % of the time. prepare_attention() checks that it is aligned there.
template <class C>
inline constexpr bool kRoundsUp = C::kDim != 96;

// Start of the layout. The array that is rounded up is declared without an alignment: given one, the compiler would
// omit the rounding.
template <class C>
__device__ __forceinline__ unsigned char* attention_shared() {
  if constexpr (kRoundsUp<C>) {
    extern __shared__ unsigned char dynamic_shared[];
    return cuda::aligned_shared<cuda::kPanelRowBytes>(dynamic_shared);
  } else {
    extern __shared__ __align__(128) unsigned char aligned_dynamic_shared[];
    return aligned_dynamic_shared;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    attention_kernel(const __grid_constant__ cuda::AttentionParams p) {
  using Layout = SharedLayout<C>;
  unsigned char* const shared = attention_shared<C>();
  __shared__ cuda::WorkTile work_tile;  // in shared memory, because most of it is needed only at the start and the end

  const cuda::WorkIndex work_index = cuda::work_index(p.schedule.early_entries, p.schedule.entry_heads,
                                                      p.schedule.swizzle_heads, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) work_tile = p.tables.work_tiles[work_index.entry];
  __syncthreads();
  const int head = work_tile.head + work_index.head;

  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  const TileMap<C> map{p, work_tile, reinterpret_cast<TileAddress*>(shared + Layout::kTileAddresses),
                       head / (p.heads / p.kv_heads)};
  const int tiles = work_tile.tiles;
  if (tiles > 0) {
    const char* q =
        static_cast<const char*>(p.q.data) + 2 * (work_tile.row * p.q.token_stride + head * p.q.head_stride);
    cuda::copy_tile<C::kQueryTile, C::kDim, C::kThreads>(q_tile, {q, 2 * p.q.token_stride}, work_tile.valid_row_begin,
                                                         work_tile.valid_row_end);
  }
  map.resolve(0, kTileAddresses);
  __syncthreads();

  const auto k_stage = [&](int i) { return k_tiles + static_cast<std::uint32_t>(i % C::kStages * Layout::kKBytes); };
  const auto v_stage = [&](int i) { return v_tiles + static_cast<std::uint32_t>(i % C::kStages * Layout::kVBytes); };
  if (tiles > 0) {
    map.copy_k(0, k_stage(0));
    if constexpr (C::kStages > 1) map.copy_v(0, v_stage(0));
  }
  cuda::copy_commit();

  AttentionState<C> state;
  HeldPartials held;
  load_attention_state<C>(p, work_tile, head, state, held);

  const TileStep<C, WorkTileRows> step(p, {work_tile}, q_tile);
  // A masked tile's first key, or the address of its keys' positions, loaded on demand.
  const auto first_key = [&](int i) { return [at = map.tile_address(i) + 32] { return load_key(at); }; };
  for (int i = 0; i < tiles;) {
    // A work tile's tiles have consecutive indices, so the current partial at a split's first tile belongs to the split
    // before.
    const int tile_in_split =
        static_cast<int>((static_cast<std::uint32_t>(work_tile.split_position) + i) % kTilesPerKvSplit);
    if (tile_in_split == 0 && held.current) merge_current_split<C>(p, work_tile, head, state, held);
    held.current = true;
    const int end = min(tiles, i + kTilesPerKvSplit - tile_in_split);
    for (; i < end; ++i) {
      cuda::copy_wait<0>();
      __syncthreads();
      if constexpr (C::kStages > 1) {
        // Tile i has arrived, and all warps are done with tile i − 1.
        if (i + 1 < tiles) {
          map.copy_k(i + 1, k_stage(i + 1));
          map.copy_v(i + 1, v_stage(i + 1));
        }
        cuda::copy_commit();
        map.resolve_ahead(i + 1);
        step.attend(state, k_stage(i), v_stage(i), map.masked(i), first_key(i), [] {});
      } else {
        // K of tile i has arrived, and all warps are done with V of tile i − 1.
        map.copy_v(i, v_stage(i));
        cuda::copy_commit();
        map.resolve_ahead(i + 1);
        step.attend(state, k_stage(i), v_stage(i), map.masked(i), first_key(i), [&] {
          cuda::copy_wait<0>();
          __syncthreads();  // V has arrived, and all warps are done with K
          if (i + 1 < tiles) map.copy_k(i + 1, k_stage(i + 1));
          cuda::copy_commit();
        });
      }
    }
  }

  if (p.state.save) save_attention_state<C>(p, work_tile, head, state, held);
  if (p.finish) {
    if (held.merged) add_merged<C>(p, work_tile, head, state, held);
    finish_rows<C>(p, work_tile, head, q_tile, state);
  }
  release_scratch<C>(p, held);
}

// Turns a configuration into a kernel and its launch. kernels/instances.cmake lists its instantiations.

// Dynamic shared memory of a CTA.
template <class C>
inline constexpr int kAttentionLaunchBytes = cuda::aligned_shared_bytes(SharedLayout<C>::kBytes, cuda::kPanelRowBytes);

template <class Element, AttentionConfig kConfig, bool kPositions>
void prepare_attention() {
  using C = KernelConfig<Element, kConfig, kPositions>;
  // With the work tile at most 99 KiB, which every device from sm_80 on provides per CTA.
  static_assert(SharedLayout<C>::kBytes == kConfig.shared_bytes());
  static_assert(kAttentionLaunchBytes<C> + 128 <= 99 * 1024);
  if constexpr (!kRoundsUp<C>) {
    // The dynamic array follows the static shared memory.
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, attention_kernel<C>), "cudaFuncGetAttributes");
    if (attributes.sharedSizeBytes % cuda::kPanelRowBytes != 0) {
      fail(ErrorCode::kUnsupported, "sm80_attention with head_dim 96",
           "it was compiled with options that ignore the alignment of shared memory", "Compile it without -Ofc.");
    }
  }
  check_cuda(
      cudaFuncSetAttribute(attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionLaunchBytes<C>),
      "cudaFuncSetAttribute");
}

template <class Element, AttentionConfig kConfig, bool kPositions>
void launch_attention(const cuda::AttentionParams& params, Stream stream) {
  using C = KernelConfig<Element, kConfig, kPositions>;
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  attention_kernel<C><<<blocks, C::kThreads, kAttentionLaunchBytes<C>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention");
}

template <class Element, AttentionConfig kConfig, bool kPositions = false>
constexpr cuda::Launcher launcher_of() {
  return {prepare_attention<Element, kConfig, kPositions>, launch_attention<Element, kConfig, kPositions>};
}

}  // namespace ringattn::sm80
