// SPDX-License-Identifier: Apache-2.0
// Gram matrices of channels on any GPU, bitwise equal to the host's. A thread block has 64 × 64 sums of a head and
// loops over the tokens. A thread has 4 × 4 sums.
#include "base/cuda.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/quant/cuda/row_quads.cuh"
#include "kernels/quant/cuda/rows.hpp"
#include "kernels/quant/gram.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kGramThreads = 256;
constexpr int kTile = 64;       // channels
constexpr int kTokens = 32;     // tokens per step
constexpr int kThreadTile = 4;  // channels of each side per thread
constexpr int kStep = kGramThreads / kTile;
constexpr int kLoads = kTokens / kStep;

struct GramParams {
  DeviceRows rows;
  std::int64_t tokens;
  int dim;
  double* sums;
};

// A thread's elements of a tile: one channel of every kStep-th token.
template <class Element>
struct TileColumn {
  float x[kLoads];

  __device__ __forceinline__ void load(const GramParams& p, std::int64_t first, int head, int channel) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t token = first + static_cast<int>(threadIdx.x) / kTile + i * kStep;
      const bool present = token < p.tokens && channel < p.dim;
      x[i] = present ? widen<Element>(reinterpret_cast<const std::uint16_t*>(p.rows.at(token, head))[channel]) : 0.0F;
    }
  }
  __device__ __forceinline__ void store(double (*to)[kTile]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      to[static_cast<int>(threadIdx.x) / kTile + i * kStep][threadIdx.x % kTile] = static_cast<double>(x[i]);
    }
  }
};

template <class Element>
__global__ void __launch_bounds__(kGramThreads) gram_kernel(const __grid_constant__ GramParams p) {
  __shared__ __align__(16) double left[kTokens][kTile], right[kTokens][kTile];
  const auto row = static_cast<int>(blockIdx.x) * kTile, column = static_cast<int>(blockIdx.y) * kTile;
  if (column < row) return;
  const auto head = static_cast<int>(blockIdx.z);
  const auto of_tile = static_cast<int>(threadIdx.x) % kTile;
  const int own_row = static_cast<int>(threadIdx.x) / 16 * kThreadTile;
  const int own_column = static_cast<int>(threadIdx.x) % 16 * kThreadTile;
  double* const sums = p.sums + static_cast<std::int64_t>(head) * p.dim * p.dim;
  const auto at = [&](int i, int j) {
    return sums + static_cast<std::int64_t>(row + own_row + i) * p.dim + column + own_column + j;
  };
  const bool present = row + own_row < p.dim && column + own_column < p.dim;  // dims are multiples of 8
  double sum[kThreadTile][kThreadTile];
#pragma unroll
  for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
    for (int j = 0; j < kThreadTile; ++j) sum[i][j] = present ? *at(i, j) : 0.0;
  }
  TileColumn<Element> rows_ahead, columns_ahead;
  rows_ahead.load(p, 0, head, row + of_tile);
  columns_ahead.load(p, 0, head, column + of_tile);
  for (std::int64_t first = 0; first < p.tokens; first += kTokens) {
    __syncthreads();
    rows_ahead.store(left);
    columns_ahead.store(right);
    __syncthreads();
    rows_ahead.load(p, first + kTokens, head, row + of_tile);
    columns_ahead.load(p, first + kTokens, head, column + of_tile);
    const std::int64_t rest = p.tokens - first;
    const int count = rest < kTokens ? static_cast<int>(rest) : kTokens;
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      double a[kThreadTile], b[kThreadTile];
#pragma unroll
      for (int i = 0; i < kThreadTile; ++i) a[i] = left[t][own_row + i];
#pragma unroll
      for (int j = 0; j < kThreadTile; ++j) b[j] = right[t][own_column + j];
#pragma unroll
      for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadTile; ++j) sum[i][j] = fma(a[i], b[j], sum[i][j]);
      }
    }
  }
  if (!present) return;
#pragma unroll
  for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
    for (int j = 0; j < kThreadTile; ++j) *at(i, j) = sum[i][j];
  }
}

}  // namespace

void add_gram(const GramTask& task, Stream stream) {
  check_task(task);
  const TensorView& rows = task.rows;
  if (rows.tokens == 0 || rows.heads == 0) return;
  const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
  const GramParams p{{const_cast<std::byte*>(static_cast<const std::byte*>(rows.data)), rows.token_stride * element,
                      rows.head_stride * element},
                     rows.tokens,
                     static_cast<int>(rows.dim),
                     task.sums};
  const auto tiles = static_cast<unsigned>((rows.dim + kTile - 1) / kTile);
  const dim3 grid(tiles, tiles, static_cast<unsigned>(rows.heads));
  if (rows.dtype == Dtype::kBf16) {
    gram_kernel<__nv_bfloat16><<<grid, kGramThreads, 0, cuda_stream(stream)>>>(p);
  } else {
    gram_kernel<__half><<<grid, kGramThreads, 0, cuda_stream(stream)>>>(p);
  }
  check_cuda(cudaGetLastError(), "add_gram");
}

}  // namespace ringattn::cuda
