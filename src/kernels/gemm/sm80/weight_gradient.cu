// SPDX-License-Identifier: Apache-2.0
// The kernel of sm80_weight_gradient. One CTA computes a tile of 128 × 128 elements of one head's matrix. A pipeline
// stage holds 64 tokens of both operands; tokens after the end of a unit are zeros. Each unit is summed from zero in
// the tensor cores' accumulators, and added to the running sum in registers.
#include "base/cuda.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/gemm/cuda/gemm_tile.cuh"
#include "kernels/gemm/sm80/sm80_weight_gradient.hpp"

namespace ringattn::sm80 {

namespace {

constexpr int kTile = 128;  // of n and of k
constexpr int kThreads = 256;
constexpr int kTokens = 64;  // of a stage
constexpr int kStages = 3;
constexpr int kOperandBytes = 2 * cuda::panel_bytes(kTokens);
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kSharedBytes <= 99 * 1024 && kTile == 2 * cuda::kPanelColumns);

// The stages of a launch, unit by unit.
struct StageCursor {
  int unit = 0;
  int token = 0;  // of the unit

  __device__ bool ends_unit(const WeightGradientParams& p) const { return token + kTokens >= p.units[unit].tokens; }
  __device__ void advance(const WeightGradientParams& p) {
    if (ends_unit(p)) {
      ++unit;
      token = 0;
    } else {
      token += kTokens;
    }
  }
};

// Copies columns [column, column + kTile) of a stage's tokens.
__device__ __forceinline__ void copy_operand(std::uint32_t to, const char* data,
                                             const cuda::GemmOperand<const char>& operand, const TokenUnit& unit,
                                             int token, int column, int columns) {
  const cuda::RowsOf rows{data + unit.first * operand.stride, operand.stride};
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    cuda::copy_panel<kTokens, kThreads>(to + static_cast<std::uint32_t>(panel * cuda::panel_bytes(kTokens)), rows,
                                        operand.aligned, token, static_cast<int>(unit.tokens),
                                        column + panel * cuda::kPanelColumns, columns, static_cast<int>(threadIdx.x));
  }
}

// Address of 8 columns, chunk `chunk`, of a token of an operand.
__device__ __forceinline__ std::uint32_t at_chunk(std::uint32_t operand, int token, int chunk) {
  return operand + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kTokens)) +
         cuda::swizzled(token, chunk % 8);
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) weight_gradient_kernel(const __grid_constant__ WeightGradientParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const std::uint32_t stages = cuda::shared_address(shared);
  const int tiles_k = (p.dim_k + kTile - 1) / kTile;
  const int tile_n = static_cast<int>(blockIdx.x) / tiles_k * kTile;
  const int tile_k = static_cast<int>(blockIdx.x) % tiles_k * kTile;
  const char* const dout = p.dout.data + blockIdx.y * p.dout.head_stride;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_n = warp / 2 * 32;  // a warp computes 32 × 64 elements
  const int warp_k = warp % 2 * 64;

  StageCursor next;
  const auto copy = [&](int nth) {
    if (next.unit < p.unit_count) {
      const std::uint32_t to = stages + static_cast<std::uint32_t>(nth % kStages * kStageBytes);
      copy_operand(to, dout, p.dout, p.units[next.unit], next.token, tile_n, p.dim_n);
      copy_operand(to + kOperandBytes, p.rows.data, p.rows, p.units[next.unit], next.token, tile_k, p.dim_k);
      next.advance(p);
    }
    cuda::copy_commit();  // also past the last stage, because copy_wait() counts groups
  };
  for (int nth = 0; nth < kStages - 1; ++nth) copy(nth);

  // Elements [row, 2 columns] of block b of 8 columns: rows lane / 4 and lane / 4 + 8 of each 16.
  const auto for_each_pair = [&](auto body) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = tile_n + warp_n + block * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int columns = 0; columns < 8; ++columns) {
          const int k = tile_k + warp_k + columns * 8 + lane % 4 * 2;
          if (n < p.dim_n && k < p.dim_k) {
            body(block, columns, half, p.dw + ((std::int64_t{blockIdx.y} * p.dim_n + n) * p.dim_k + k));
          }
        }
      }
    }
  };
  float total[2][8][4] = {};
  if (p.continues) {
    for_each_pair([&](int block, int columns, int half, const float* at) {
      total[block][columns][2 * half] = at[0];
      total[block][columns][2 * half + 1] = at[1];
    });
  }
  float sums[2][8][4] = {};
  bool stored = p.continues;
  StageCursor current;
  for (int nth = 0; current.unit < p.unit_count; ++nth) {
    cuda::copy_wait<kStages - 2>();
    __syncthreads();  // the stage has arrived, and all warps are done with the previous one, which is filled next
    copy(nth + kStages - 1);
    const std::uint32_t left = stages + static_cast<std::uint32_t>(nth % kStages * kStageBytes);
    const std::uint32_t right = left + kOperandBytes;
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int block = 0; block < 2; ++block) {  // matrices: n, n + 8 of 8 tokens, then of the next 8
        cuda::load_matrix_transposed(
            a[block], at_chunk(left, step * 16 + lane % 8 + lane / 16 * 8, (warp_n + block * 16) / 8 + lane / 8 % 2));
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {  // matrices: 8 tokens, the next 8, then both of k + 8
        std::uint32_t b[4];
        cuda::load_matrix_transposed(b, at_chunk(right, step * 16 + lane % 16, (warp_k + pair * 16) / 8 + lane / 16));
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          using Mma = cuda::MmaTraits<Element>;
          Mma::mma(sums[block][2 * pair], a[block], b[0], b[1], sums[block][2 * pair]);
          Mma::mma(sums[block][2 * pair + 1], a[block], b[2], b[3], sums[block][2 * pair + 1]);
        }
      }
    }
    if (current.ends_unit(p)) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int columns = 0; columns < 8; ++columns) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = sums[block][columns][i];
            total[block][columns][i] = stored ? __fadd_rn(total[block][columns][i], sum) : sum;
            sum = 0.0F;
          }
        }
      }
      stored = true;
    }
    current.advance(p);
  }
  for_each_pair([&](int block, int columns, int half, float* at) {
    *reinterpret_cast<float2*>(at) = {total[block][columns][2 * half], total[block][columns][2 * half + 1]};
  });
}

auto* kernel_of(Dtype dtype) {
  return dtype == Dtype::kBf16 ? weight_gradient_kernel<__nv_bfloat16> : weight_gradient_kernel<__half>;
}

}  // namespace

void load_weight_gradient(Dtype dtype) {
  if (dtype == Dtype::kF32) return load_weight_gradient_simt();
  check_cuda(cudaFuncSetAttribute(kernel_of(dtype), cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "cudaFuncSetAttribute");
}

void launch_weight_gradient(const WeightGradientParams& params, Dtype dtype, Stream stream) {
  if (dtype == Dtype::kF32) return launch_weight_gradient_simt(params, stream);
  const auto tiles = [](int dim) { return static_cast<unsigned>((dim + kTile - 1) / kTile); };
  const dim3 grid(tiles(params.dim_n) * tiles(params.dim_k), static_cast<unsigned>(params.dout.heads));
  kernel_of(dtype)<<<grid, kThreads, kSharedBytes, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_weight_gradient");
}

}  // namespace ringattn::sm80
