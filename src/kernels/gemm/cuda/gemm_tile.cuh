// SPDX-License-Identifier: Apache-2.0
// Device code shared by the batched GEMM kernels: output tile coordinates, loads of panels of A (rows) and B (weights)
// into shared memory by threads, and the epilogue that rounds and stores a tile's accumulators.
//
// A tile accumulates over K in ascending steps of 16, in one accumulator that starts at zero. If K or N doesn't fill
// the last panel, it is padded with zeros.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/gemm/cuda/gemm_params.hpp"

namespace ringattn::cuda {

// The first row and column of an output tile, and its head.
struct GemmTile {
  int row;
  int head;
  int column;
};

// Tiles that share rows follow each other, so that the rows are read from memory once even if all heads share them.
template <int kRows>
__device__ __forceinline__ GemmTile gemm_tile(const GemmParams& p, std::uint32_t number) {
  const auto columns = static_cast<std::uint32_t>((p.dim_n + kGemmTileN - 1) / kGemmTileN);
  const auto heads = static_cast<std::uint32_t>(p.heads);
  const std::uint32_t column_strip = number / columns;
  return {static_cast<int>(column_strip / heads) * kRows, static_cast<int>(column_strip % heads),
          static_cast<int>(number % columns) * kGemmTileN};
}

// Copies a panel of 64 columns from `column` on, rows [first, first + kPanelRows), of a [rows, columns] matrix.
// Elements outside become zeros. `thread` is one of the kThreads that copy together. Copies may still be in flight at
// the return (copy_commit).
template <int kPanelRows, int kThreads>
__device__ __forceinline__ void copy_panel(std::uint32_t target, const RowsOf& source, bool aligned, int first,
                                           int rows, int column, int columns, int thread) {
  constexpr int kStep = kThreads / 8;  // rows per pass
  static_assert(kPanelRows % kStep == 0);
  const int chunk = thread % 8;
  const bool in_columns = column + chunk * 8 < columns;
#pragma unroll 4
  for (int row = thread / 8; row < kPanelRows; row += kStep) {
    const bool present = in_columns && first + row < rows;
    const char* const from = present ? source.at(first + row) + (column + chunk * 8) * 2 : source.data;
    copy_chunk(target + swizzled(row, chunk), from, present, aligned);
  }
}

// A tile's weights take as much shared memory transposed (two panels of kGemmTileK rows) as not (one of kGemmTileN).
static_assert(kGemmTileK == kPanelColumns && kGemmTileN == 2 * kPanelColumns);

// Copies both operands of one K step from `depth` on: rows as one panel, weights in their layout.
template <int kRows, bool kTransposed, int kThreads>
__device__ __forceinline__ void copy_operands(const GemmParams& p, const GemmTile& tile, int depth,
                                              std::uint32_t rows_to, std::uint32_t weights_to, int thread) {
  const RowsOf rows{p.rows.data + tile.head * p.rows.head_stride, p.rows.stride};
  copy_panel<kRows, kThreads>(rows_to, rows, p.rows.aligned, tile.row, p.row_count, depth, p.dim_k, thread);
  const RowsOf weights{p.weights.data + tile.head * p.weights.head_stride, p.weights.stride};
  if constexpr (kTransposed) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      copy_panel<kGemmTileK, kThreads>(weights_to + static_cast<std::uint32_t>(panel * panel_bytes(kGemmTileK)),
                                       weights, p.weights.aligned, depth, p.dim_k, tile.column + panel * kPanelColumns,
                                       p.dim_n, thread);
    }
  } else {
    copy_panel<kGemmTileN, kThreads>(weights_to, weights, p.weights.aligned, tile.column, p.dim_n, depth, p.dim_k,
                                     thread);
  }
}

// In a quad of threads, words[i] of thread t becomes words[t] of thread i.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&words)[4]) {
  const bool odd = threadIdx.x % 2 != 0;
  const bool upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t received = __shfl_xor_sync(0xffffffffU, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? received : words[i];
    words[i + 1] = odd ? words[i + 1] : received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t received = __shfl_xor_sync(0xffffffffU, upper ? words[i] : words[i + 2], 2);
    words[i] = upper ? received : words[i];
    words[i + 2] = upper ? words[i + 2] : received;
  }
}

// Rounds and writes a thread's values of kBlocks blocks of 8 columns from `column` on, in rows `row` and `row` + 8, in
// mma.sync's accumulator layout. Four threads hold a block's columns of a row. After a transposition in the quad each
// writes one block. Every fp32 NaN is converted to the NaN 0x7fff. All threads of a warp call it.
template <class Element, int kBlocks>
__device__ __forceinline__ void store_sums(const GemmParams& p, int head, int row, int column,
                                           const float (&sums)[kBlocks][4]) {
  static_assert(kBlocks % 4 == 0);
  const int own = column + static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    char* const to = p.out.data + at * p.out.stride + head * p.out.head_stride;
#pragma unroll
    for (int first = 0; first < kBlocks; first += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = MmaTraits<Element>::pack(sums[first + i][2 * half], sums[first + i][2 * half + 1]);
      }
      transpose_in_quad(words);
      const int block = own + first * 8;
      if (at < p.row_count && block < p.dim_n) {
        store_elements(reinterpret_cast<std::uint16_t*>(to) + block, uint4{words[0], words[1], words[2], words[3]},
                       p.out.aligned);
      }
    }
  }
}

}  // namespace ringattn::cuda
