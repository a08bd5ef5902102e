// SPDX-License-Identifier: Apache-2.0
// Batched GEMM on tensor cores through mma.sync, sm_80 and later, and its launch. One CTA computes one output tile.
#pragma once

#include <cstdint>

#include "base/cuda.hpp"
#include "kernels/gemm/cuda/gemm_tile.cuh"
#include "kernels/gemm/sm80/sm80_gemm.hpp"

namespace ringattn::sm80 {

// One warp's part of a tile, 32 rows × 64 columns, and its ldmatrix addresses.
template <class C>
struct WarpPart {
  int row;     // in the tile
  int column;  // in the tile
  int lane;

  __device__ WarpPart() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    row = warp / 2 * 32;
    column = warp % 2 * 64;
    lane = static_cast<int>(threadIdx.x) % 32;
  }

  // A fragment of 16 rows × 16 K: the four matrices are rows 0 … 7 and 8 … 15 of the first eight K, then of the others.
  __device__ __forceinline__ void load_rows(std::uint32_t (&a)[4], std::uint32_t rows, int block, int step) const {
    cuda::load_matrix(a, rows + cuda::swizzled(row + block * 16 + lane % 16, 2 * step + lane / 16));
  }
  // A fragment of 16 columns × 16 K: the four matrices are both halves of K of columns 0 … 7, then of columns 8 … 15.
  __device__ __forceinline__ void load_weights(std::uint32_t (&b)[4], std::uint32_t weights, int pair, int step) const {
    const int first = column + pair * 16;
    if constexpr (C::kTransposed) {
      const int chunk = first / 8 + lane / 16;  // in both panels
      cuda::load_matrix_transposed(b, weights +
                                          static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(cuda::kGemmTileK)) +
                                          cuda::swizzled(step * 16 + lane % 16, chunk % 8));
    } else {
      cuda::load_matrix(b, weights + cuda::swizzled(first + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
    }
  }
};

template <class Element_, GemmConfig kConfig, bool kTransposed_>
struct GemmKernel {
  using Element = Element_;
  static constexpr int kRows = kConfig.rows;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kStages = kConfig.stages;
  static constexpr int kStageBytes = kConfig.stage_bytes();
  static constexpr int kSharedBytes = kConfig.shared_bytes();
  static constexpr bool kTransposed = kTransposed_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2) gemm_kernel(const __grid_constant__ cuda::GemmParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const std::uint32_t stages = cuda::shared_address(shared);
  const cuda::GemmTile tile = cuda::gemm_tile<C::kRows>(p, blockIdx.x);
  const int panels = (p.dim_k + cuda::kGemmTileK - 1) / cuda::kGemmTileK;

  const auto stage = [&](int panel) {
    return stages + static_cast<std::uint32_t>(panel % C::kStages * C::kStageBytes);
  };
  // Every panel commits a cp.async group, also past the last one, because copy_wait() counts groups.
  const auto copy = [&](int panel) {
    if (panel < panels) {
      cuda::copy_operands<C::kRows, C::kTransposed, C::kThreads>(p, tile, panel * cuda::kGemmTileK, stage(panel),
                                                                 stage(panel) + C::kRows * cuda::kPanelRowBytes,
                                                                 static_cast<int>(threadIdx.x));
    }
    cuda::copy_commit();
  };
  for (int panel = 0; panel < C::kStages - 1; ++panel) copy(panel);

  const WarpPart<C> part;
  float sums[2][8][4] = {};
  for (int panel = 0; panel < panels; ++panel) {
    cuda::copy_wait<C::kStages - 2>();
    __syncthreads();  // the panel has arrived, and all warps are done with the previous one, whose stage is filled next
    copy(panel + C::kStages - 1);
    const std::uint32_t rows = stage(panel);
    const std::uint32_t weights = rows + C::kRows * cuda::kPanelRowBytes;
#pragma unroll
    for (int step = 0; step < cuda::kGemmTileK / 16; ++step) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int block = 0; block < 2; ++block) part.load_rows(a[block], rows, block, step);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        std::uint32_t b[4];
        part.load_weights(b, weights, pair, step);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          using Mma = cuda::MmaTraits<typename C::Element>;
          Mma::mma(sums[block][2 * pair], a[block], b[0], b[1], sums[block][2 * pair]);
          Mma::mma(sums[block][2 * pair + 1], a[block], b[2], b[3], sums[block][2 * pair + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    cuda::store_sums<typename C::Element>(p, tile.head, tile.row + part.row + block * 16 + part.lane / 4,
                                          tile.column + part.column, sums[block]);
  }
}

// Turns GEMM parameters into a kernel and its launch. kernels/instances.cmake lists its instantiations.

template <class C>
void prepare_kernel() {
  check_cuda(cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class C>
void launch_kernel(const cuda::GemmParams& p, Stream stream) {
  const auto tiles = static_cast<unsigned>(cuda::gemm_tiles(p, C::kRows));
  gemm_kernel<C><<<tiles, C::kThreads, C::kSharedBytes, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "sm80_gemm");
}

template <class Element>
void prepare_gemm() {
  prepare_kernel<GemmKernel<Element, kFewRowsConfig, false>>();
  prepare_kernel<GemmKernel<Element, kFewRowsConfig, true>>();
  prepare_kernel<GemmKernel<Element, kManyRowsConfig, false>>();
  prepare_kernel<GemmKernel<Element, kManyRowsConfig, true>>();
}

template <class Element>
void launch_gemm(const cuda::GemmParams& p, Stream stream) {
  if (p.row_count <= kFewRows) {
    p.transposed ? launch_kernel<GemmKernel<Element, kFewRowsConfig, true>>(p, stream)
                 : launch_kernel<GemmKernel<Element, kFewRowsConfig, false>>(p, stream);
  } else {
    p.transposed ? launch_kernel<GemmKernel<Element, kManyRowsConfig, true>>(p, stream)
                 : launch_kernel<GemmKernel<Element, kManyRowsConfig, false>>(p, stream);
  }
}

template <class Element>
constexpr cuda::GemmLauncher gemm_launcher() {
  return {prepare_gemm<Element>, launch_gemm<Element>};
}

}  // namespace ringattn::sm80
