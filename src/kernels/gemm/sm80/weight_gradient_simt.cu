// SPDX-License-Identifier: Apache-2.0
// The kernel of sm80_weight_gradient_simt: fp32, by fused multiply-adds. A unit's sums are chains over its tokens, from
// zero. They are added to dw. Each element of dw has one thread.
#include "base/cuda.hpp"
#include "kernels/gemm/cuda/simt_tile.cuh"
#include "kernels/gemm/sm80/sm80_weight_gradient.hpp"

namespace ringattn::sm80 {

namespace {

using WideGradientTile = cuda::SimtTile<128, 128, 2, 2, 3>;  // of n and k
using NarrowGradientTile = cuda::SimtTile<64, 32, 2, 2, 4>;  // for few k, such as those of biases

template <class Tile>
struct TokenOperands {
  const WeightGradientParams& p;
  const char* dout;  // of the head
  int tile_n;
  int tile_k;

  __device__ __forceinline__ int begin(int) const { return 0; }
  __device__ __forceinline__ int end(int unit) const { return static_cast<int>(p.units[unit].tokens); }
  __device__ __forceinline__ void copy(std::uint32_t row_panel, std::uint32_t column_panel, int unit, int token,
                                       int end) const {
    const std::int64_t at = p.units[unit].first + token;
    const int count = min(end - token, cuda::kSimtDepth);
    cuda::copy_simt_lines<Tile, Tile::kRows>(row_panel, dout + at * p.dout.stride, p.dout.stride, tile_n, p.dim_n,
                                             count);
    cuda::copy_simt_lines<Tile, Tile::kColumns>(column_panel, p.rows.data + at * p.rows.stride, p.rows.stride, tile_k,
                                                p.dim_k, count);
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    weight_gradient_simt_kernel(const __grid_constant__ WeightGradientParams p) {
  extern __shared__ __align__(128) float gradient_shared[];
  const int tiles_k = (p.dim_k + Tile::kColumns - 1) / Tile::kColumns;
  const int tile_n = static_cast<int>(blockIdx.x) / tiles_k * Tile::kRows;
  const int tile_k = static_cast<int>(blockIdx.x) % tiles_k * Tile::kColumns;
  const TokenOperands<Tile> operands{p, p.dout.data + blockIdx.y * p.dout.head_stride, tile_n, tile_k};
  const auto add_unit = [&](int unit, typename Tile::Sums& sums) {
    const bool is_first = unit == 0 && !p.continues;
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
      const int n = tile_n + Tile::row(i);
      float* const row = p.dw + (std::int64_t{blockIdx.y} * p.dim_n + n) * p.dim_k;
#pragma unroll
      for (int j = 0; j < Tile::kThreadColumns; ++j) {
        const int k = tile_k + Tile::column(j);
        if (n < p.dim_n && k < p.dim_k) row[k] = is_first ? sums[i][j] : __fadd_rn(row[k], sums[i][j]);
      }
    }
  };
  cuda::add_simt_runs<Tile>(gradient_shared, operands, 0, p.unit_count, add_unit);
}

template <class Tile>
void load_tile() {
  check_cuda(cudaFuncSetAttribute(weight_gradient_simt_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Tile::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class Tile>
void launch_tile(const WeightGradientParams& params, Stream stream) {
  const auto tiles = [](int dim, int of) { return static_cast<unsigned>((dim + of - 1) / of); };
  const dim3 grid(tiles(params.dim_n, Tile::kRows) * tiles(params.dim_k, Tile::kColumns),
                  static_cast<unsigned>(params.dout.heads));
  weight_gradient_simt_kernel<Tile><<<grid, Tile::kThreads, Tile::kSharedBytes, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_weight_gradient_simt");
}

}  // namespace

void load_weight_gradient_simt() {
  load_tile<WideGradientTile>();
  load_tile<NarrowGradientTile>();
}

void launch_weight_gradient_simt(const WeightGradientParams& params, Stream stream) {
  if (params.dim_k <= NarrowGradientTile::kColumns) return launch_tile<NarrowGradientTile>(params, stream);
  launch_tile<WideGradientTile>(params, stream);
}

}  // namespace ringattn::sm80
