// SPDX-License-Identifier: Apache-2.0
// int8 linear layers with mma.sync, for every GPU and any alignment of W. A CTA has 64 rows of W, 16 per warp, and 32
// rows of x.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/linear/cuda/quantized_finish.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kInt8MmaThreads = 128;
constexpr int kInt8MmaRows = 32;  // of x
constexpr int kInt8MmaColumns = 64;
constexpr int kInt8MmaBlocks = kInt8MmaRows / 8;  // of an MMA's columns
constexpr int kInt8Depth = 128;                   // of K at a time
constexpr int kInt8RowBytes = kInt8Depth + 16;    // padded: ldmatrix reads 8 rows in all banks
constexpr int kInt8Chunks = kInt8Depth / 16;
constexpr int kInt8TileBytes = (kInt8MmaRows + kInt8MmaColumns) * kInt8RowBytes;

// Copies 16 bytes of a row of W, with zeros after its end.
__device__ __forceinline__ void copy_int8_chunk(std::uint32_t to, const char* row, int begin, int features,
                                                bool present, bool aligned) {
  if (aligned && (begin + 16 <= features || !present)) {
    copy_16(to, row + begin, present);
    return;
  }
  std::uint32_t words[4] = {};
  for (int i = 0; present && i < 16 && begin + i < features; ++i) {
    words[i / 4] |= static_cast<std::uint32_t>(static_cast<unsigned char>(row[begin + i])) << (i % 4 * 8);
  }
  store_shared(to, uint4{words[0], words[1], words[2], words[3]});
}

// Starts the copy of a block of K of x, then of W.
__device__ __forceinline__ void copy_int8_block(const Int8Gemm& p, const QuantizedRows& weights, int first_row,
                                                int first_column, int block, std::uint32_t to) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto x_bytes = static_cast<int>(int8_row_bytes(p.features));
#pragma unroll
  for (int i = 0; i < kInt8MmaRows * kInt8Chunks / kInt8MmaThreads; ++i) {
    const int at = i * kInt8MmaThreads + thread;
    const int row = first_row + at / kInt8Chunks;
    const int begin = block * kInt8Depth + at % kInt8Chunks * 16;
    const bool present = row < p.out.rows && begin < x_bytes;
    copy_16(to + static_cast<std::uint32_t>(at / kInt8Chunks * kInt8RowBytes + at % kInt8Chunks * 16),
            p.x + (present ? std::int64_t{row} * x_bytes + begin : 0), present);
  }
#pragma unroll
  for (int i = 0; i < kInt8MmaColumns * kInt8Chunks / kInt8MmaThreads; ++i) {
    const int at = i * kInt8MmaThreads + thread;
    const int column = first_column + at / kInt8Chunks;
    const int begin = block * kInt8Depth + at % kInt8Chunks * 16;
    const bool present = column < p.out.columns && begin < p.features;
    copy_int8_chunk(
        to + static_cast<std::uint32_t>((kInt8MmaRows + at / kInt8Chunks) * kInt8RowBytes + at % kInt8Chunks * 16),
        weights.data + (present ? column * weights.stride : 0), present ? begin : 0, p.features, present,
        weights.aligned);
  }
  copy_commit();
}

__device__ __forceinline__ void mma_int8(int (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_int8_block(int (&sums)[kInt8MmaBlocks][4], std::uint32_t x) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  // For W, lanes 0 … 15 have rows of the first 16 bytes, and the others of the second. For x, 8 lanes have 8 rows of
  // the same 16 bytes.
  const std::uint32_t weights =
      x + static_cast<std::uint32_t>((kInt8MmaRows + thread / 32 * 16 + lane % 16) * kInt8RowBytes + lane / 16 * 16);
  const std::uint32_t rows = x + static_cast<std::uint32_t>(lane % 8 * kInt8RowBytes + lane / 8 * 16);
#pragma unroll
  for (int pair = 0; pair < kInt8Depth / 64; ++pair) {
    std::uint32_t a[2][4];
    load_matrix(a[0], weights + static_cast<std::uint32_t>(pair * 64));
    load_matrix(a[1], weights + static_cast<std::uint32_t>(pair * 64 + 32));
#pragma unroll
    for (int j = 0; j < kInt8MmaBlocks; ++j) {
      std::uint32_t b[4];
      load_matrix(b, rows + static_cast<std::uint32_t>(j * 8 * kInt8RowBytes + pair * 64));
      mma_int8(sums[j], a[0], b[0], b[1]);
      mma_int8(sums[j], a[1], b[2], b[3]);
    }
  }
}

__global__ void __launch_bounds__(kInt8MmaThreads) int8_mma_kernel(const __grid_constant__ Int8Gemm p) {
  __shared__ __align__(16) unsigned char int8_tiles[2][kInt8TileBytes];
  __shared__ __align__(16) std::int32_t int8_staged[kInt8MmaRows * kStagedRow];
  const auto tiles = static_cast<unsigned>((p.out.columns + kInt8MmaColumns - 1) / kInt8MmaColumns);
  const int first_column = static_cast<int>(blockIdx.x % tiles) * kInt8MmaColumns;
  const int first_row = static_cast<int>(blockIdx.x / tiles) * kInt8MmaRows;
  const int thread = static_cast<int>(threadIdx.x);
  const int blocks = (p.features + kInt8Depth - 1) / kInt8Depth;
  for (int m = 0; m < p.out.matrices; ++m) {
    int sums[kInt8MmaBlocks][4] = {};
    if (blocks > 0) copy_int8_block(p, p.weights[m], first_row, first_column, 0, shared_address(int8_tiles[0]));
    for (int block = 0; block < blocks; ++block) {
      copy_wait<0>();
      __syncthreads();  // this block has landed, and no thread reads the other buffer any more
      if (block + 1 < blocks) {
        copy_int8_block(p, p.weights[m], first_row, first_column, block + 1,
                        shared_address(int8_tiles[(block + 1) % 2]));
      }
      multiply_int8_block(sums, shared_address(int8_tiles[block % 2]));
    }
#pragma unroll
    for (int j = 0; j < kInt8MmaBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int8_staged[(8 * j + thread % 4 * 2 + i % 2) * kStagedRow + m * kInt8MmaColumns + thread / 32 * 16 +
                    thread % 32 / 4 + i / 2 * 8] = sums[j][i];
      }
    }
    __syncthreads();
  }
  finish_tile<std::int32_t, kInt8MmaThreads>(
      p.out, first_row, min(kInt8MmaRows, p.out.rows - first_row), first_column, kInt8MmaColumns, thread,
      [&](int row, int at) { return *reinterpret_cast<const int4*>(int8_staged + row * kStagedRow + at); },
      [&](int row) { return p.out.row_scales[first_row + row]; });
}

}  // namespace

void prepare_int8_mma() { load_kernel(int8_mma_kernel); }

void launch_int8_mma(const Int8Gemm& params, Stream stream) {
  const std::int64_t tiles = (std::int64_t{params.out.rows} + kInt8MmaRows - 1) / kInt8MmaRows *
                             ((params.out.columns + kInt8MmaColumns - 1) / kInt8MmaColumns);
  int8_mma_kernel<<<static_cast<unsigned>(tiles), kInt8MmaThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "int8_mma");
}

}  // namespace ringattn::cuda
