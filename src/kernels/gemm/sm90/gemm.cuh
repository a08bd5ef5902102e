// SPDX-License-Identifier: Apache-2.0
// Batched GEMM with wgmma. CTAs are persistent and warp-specialized. The last warp is the producer: it loads K panels
// of 64 into pipeline stages by TMA. If TMA cannot read the operands, the last four warps copy them. The consumer
// warpgroups issue MMAs of 64 rows × 128 columns. The producer runs ahead into the next tile during the epilogue.
#pragma once

#include <cstdint>

#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma_gemm.cuh"
#include "kernels/gemm/cuda/gemm_tile.cuh"
#include "kernels/gemm/sm90/gemm.hpp"

namespace ringattn::sm90 {

template <class Element_, GemmConfig kConfig, bool kTransposed_>
struct GemmKernel {
  using Element = Element_;
  static constexpr int kRows = kConfig.rows();
  static constexpr int kRowBlocks = kConfig.row_blocks;
  static constexpr int kWarpgroups = kConfig.warpgroups;
  static constexpr int kConsumers = kWarpgroup * kConfig.warpgroups;  // threads
  static constexpr int kProducerWarps = kConfig.producer_warps;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kCtas = kConfig.ctas;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kStageBytes = kConfig.stage_bytes();
  static constexpr int kRowsBytes = kRows * cuda::kPanelRowBytes;  // per stage; its weights follow
  static constexpr int kSharedBytes = kConfig.shared_bytes();
  static constexpr bool kTransposed = kTransposed_;
};

// Pipeline stages in shared memory and their barriers: full (operands landed) and empty (all consumer warps released).
template <class C>
struct GemmStages {
  std::uint32_t base;  // aligned to 1,024 bytes, as the 128-byte swizzle requires

  __device__ __forceinline__ std::uint32_t rows(std::uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t weights(std::uint32_t stage) const { return rows(stage) + C::kRowsBytes; }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t stage) const {
    return base + C::kStages * C::kStageBytes + stage * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t stage) const { return full(stage + C::kStages); }
};

// Calls visit(tile) for the output tiles of this CTA, in the same order in all warps.
template <class C, class Visit>
__device__ __forceinline__ void for_each_tile(const cuda::GemmParams& p, Visit visit) {
  const auto columns = static_cast<std::uint32_t>((p.dim_n + cuda::kGemmTileN - 1) / cuda::kGemmTileN);
  const auto row_tiles = static_cast<std::uint32_t>((p.row_count + C::kRows - 1) / C::kRows);
  const std::uint32_t tiles = row_tiles * static_cast<std::uint32_t>(p.heads) * columns;
  for (std::uint32_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    visit(cuda::gemm_tile<C::kRows>(p, number));
  }
}

__device__ __forceinline__ int gemm_panels(const cuda::GemmParams& p) {
  return (p.dim_k + cuda::kGemmTileK - 1) / cuda::kGemmTileK;
}

// Producer by TMA, one thread. Elements outside of the tensors are zero-filled, and count for the barrier's byte count.
template <class C>
__device__ __forceinline__ void load_panels(const HopperGemm& params, const GemmStages<C>& stages) {
  const cuda::GemmParams& p = params.gemm;
  const int panels = gemm_panels(p);
  PackedPipelineState<C::kStages> ring;
  for_each_tile<C>(p, [&](const cuda::GemmTile& tile) {
    const int row_head = p.rows.heads == 1 ? 0 : tile.head;
    for (int panel = 0; panel < panels; ++panel, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      const int depth = panel * cuda::kGemmTileK;
      barrier_wait(stages.empty(stage), ring.parity() ^ 1U);
      barrier_arrive_expect(stages.full(stage), C::kStageBytes);
      tma_load_box(stages.rows(stage), &params.rows, stages.full(stage), depth, row_head, tile.row);
      if constexpr (C::kTransposed) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          tma_load_box(stages.weights(stage) + static_cast<std::uint32_t>(half * cuda::panel_bytes(cuda::kGemmTileK)),
                       &params.weights, stages.full(stage), tile.column + half * cuda::kPanelColumns, tile.head, depth);
        }
      } else {
        tma_load_box(stages.weights(stage), &params.weights, stages.full(stage), depth, tile.head, tile.column);
      }
    }
  });
}

// Producer by copies of threads. Fills stages as TMA would.
template <class C>
__device__ __forceinline__ void copy_panels(const cuda::GemmParams& p, const GemmStages<C>& stages) {
  const int thread = static_cast<int>(threadIdx.x) - C::kConsumers;
  const int panels = gemm_panels(p);
  PackedPipelineState<C::kStages> ring;
  for_each_tile<C>(p, [&](const cuda::GemmTile& tile) {
    for (int panel = 0; panel < panels; ++panel, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      barrier_wait(stages.empty(stage), ring.parity() ^ 1U);
      cuda::copy_operands<C::kRows, C::kTransposed, 32 * C::kProducerWarps>(
          p, tile, panel * cuda::kGemmTileK, stages.rows(stage), stages.weights(stage), thread);
      cuda::copy_commit();
      cuda::copy_wait<0>();
      proxy_fence();
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(stages.full(stage));
    }
  });
}

// Issues the MMAs of one K panel: sums[b] += rows · weightsᵀ for the warpgroup's b-th block of 64 rows.
template <class C>
__device__ __forceinline__ void multiply_panel(float (&sums)[C::kRowBlocks][16][4], std::uint32_t rows,
                                               std::uint32_t weights, bool first) {
  // Broadcasts a warp-uniform value, so that the compiler computes descriptors in uniform registers.
  const auto warp_uniform = [](std::uint32_t number) { return __shfl_sync(0xffffffffU, number, 0); };
  const std::uint32_t a = warp_uniform(descriptor_low(rows));
  const std::uint32_t b = warp_uniform(C::kTransposed ? descriptor_low(weights, cuda::panel_bytes(cuda::kGemmTileK))
                                                      : descriptor_low(weights));
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) pin(sums[block]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < cuda::kGemmTileK / 16; ++step) {
    // The next 16 of K: 32 bytes further in each row; with transposed weights, 16 rows further.
    const auto b_step = static_cast<std::uint32_t>(step * (C::kTransposed ? 16 * cuda::kPanelRowBytes : 32) >> 4);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
      const auto a_step = static_cast<std::uint32_t>((block * 64 * cuda::kPanelRowBytes + step * 32) >> 4);
      GemmWgmma<typename C::Element, C::kTransposed>::multiply(sums[block], descriptor(a + a_step),
                                                               descriptor(b + b_step), step > 0 || !first);
    }
  }
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void multiply_tiles(const cuda::GemmParams& p, const GemmStages<C>& stages) {
  const int panels = gemm_panels(p);
  const int first_row = thread_of_cta() / kWarpgroup * C::kRowBlocks * 64;  // of this warpgroup in the tile
  PackedPipelineState<C::kStages> ring;
  const auto release_stage = [&](std::uint32_t stage) {
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(stages.empty(stage));
  };
  for_each_tile<C>(p, [&](const cuda::GemmTile& tile) {
    float sums[C::kRowBlocks][16][4];
    std::uint32_t previous = 0;  // the stage of the previous panel
    for (int panel = 0; panel < panels; ++panel, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      barrier_wait(stages.full(stage), ring.parity());
      multiply_panel<C>(sums, stages.rows(stage) + static_cast<std::uint32_t>(first_row * cuda::kPanelRowBytes),
                        stages.weights(stage), panel == 0);
      if (panel > 0) {
        wgmma_wait<1>();
        release_stage(previous);
      }
      previous = stage;
    }
    wgmma_wait<0>();
    release_stage(previous);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
      pin(sums[block]);
      cuda::store_sums<typename C::Element>(p, tile.head, tile.row + first_row + block * 64 + tile_row_of_thread(),
                                            tile.column, sums[block]);
    }
  });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) gemm_kernel(const __grid_constant__ HopperGemm params) {
  extern __shared__ unsigned char shared[];
  const GemmStages<C> stages{cuda::aligned_shared_address<1024>(shared)};
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(stages.full(stage), C::kProducerWarps);
      barrier_init(stages.empty(stage), C::kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < C::kConsumers) {
    multiply_tiles<C>(params.gemm, stages);
  } else if constexpr (C::kProducerWarps > 1) {
    copy_panels<C>(params.gemm, stages);
  } else {
    if (threadIdx.x % 32 == 0) load_panels<C>(params, stages);
  }
}

}  // namespace ringattn::sm90
