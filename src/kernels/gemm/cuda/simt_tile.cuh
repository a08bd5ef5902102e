// SPDX-License-Identifier: Apache-2.0
// Products of fp32 matrices without tensor cores: out[row, column] = Σ_k a[row, k] · b[column, k]. An element is one
// chain of fused multiply-adds over a run of k, ascending, from zero. So its bits do not depend on the tile, and are
// those of the CPU kernels' products (gemm-inl.hpp).
//
// A stage of shared memory has kSimtDepth elements of K of each row of both operands, in panels (panels.hpp).
#pragma once

#include <cstdint>

#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::cuda {

inline constexpr int kSimtDepth = kPanelRowBytes / 4;  // elements of K of a stage

// A warp has 4 × 8 lanes. A lane has each fourth row and each eighth column of its warp's: rows next to each other, and
// columns, are in different banks.
template <int kRows_, int kColumns_, int kRowWarps, int kColumnWarps, int kStages_>
struct SimtTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kThreads = kRowWarps * kColumnWarps * 32;
  static constexpr int kThreadRows = kRows / kRowWarps / 4, kThreadColumns = kColumns / kColumnWarps / 8;
  static constexpr int kThreadSums = kThreadRows * kThreadColumns;
  static constexpr int kStageBytes = (kRows + kColumns) * kPanelRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kThreadRows % 2 == 0 && kThreadColumns % 2 == 0 && kRows % (kThreads / 8) == 0 &&
                kColumns % (kThreads / 8) == 0);
  static_assert(kSharedBytes <= 99 * 1024);  // what every device from sm_80 on provides per CTA

  using Sums = float[kThreadRows][kThreadColumns];

  // Lanes that differ in bit 0 read the same rows, and those that differ in bit 1 the same columns, so that 16-byte
  // loads of two quarter-warps are served together.
  static __device__ __forceinline__ int lane_row() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return lane / 2 % 2 + lane / 16 * 2;
  }
  static __device__ __forceinline__ int lane_column() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return lane % 2 + lane / 4 % 4 * 2;
  }
  // Row i of a thread. The first one is lane_row() after a multiple of 8.
  static __device__ __forceinline__ int row(int i) {
    return static_cast<int>(threadIdx.x) / 32 / kColumnWarps * (kThreadRows * 4) + i * 4 + lane_row();
  }
  // Column j of a thread: half of them are in each half of the tile, at the same place.
  static __device__ __forceinline__ int column(int j) {
    constexpr int kHalf = kThreadColumns / 2;
    return static_cast<int>(threadIdx.x) / 32 % kColumnWarps * (kHalf * 8) + j / kHalf * (kColumns / 2) +
           j % kHalf * 8 + lane_column();
  }
};

// Copies elements [k, min(k + kSimtDepth, end)) of an operand whose rows have contiguous k. row_at(first, own) is the
// address of row first + own of the tile; `first` is the same for all threads. Rows after the last may be copies of it,
// whose products are not stored. `aligned`: each row's element k is aligned to 16 bytes.
template <class Tile, int kRows, class RowAt>
__device__ __forceinline__ void copy_simt_rows(std::uint32_t panel, RowAt row_at, bool aligned, int k, int end) {
  constexpr int kRowsAtOnce = Tile::kThreads / 8;
  static_assert(kRowsAtOnce % 8 == 0);  // so that their swizzle is the same
  const int thread = thread_of_cta();
  const int chunk = thread % 8, own = thread / 8;
  const std::uint32_t to = panel + swizzled(own, chunk);
  const auto offset = static_cast<unsigned>(k + chunk * 4) * 4U;
  if (aligned && k + kSimtDepth <= end) {
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
      copy_16(to + static_cast<std::uint32_t>(row * kPanelRowBytes), row_at(row, own) + offset, true);
    }
    return;
  }
  const int left = end - k - chunk * 4;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const char* const from = row_at(row, own) + offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) copy_4(to + static_cast<std::uint32_t>(row * kPanelRowBytes + i * 4), from + i * 4, true);
    }
  }
}

// Copies `count` elements of K, up to kSimtDepth, of an operand that is transposed: its rows are contiguous, and
// `stride` bytes are between elements of K. Rows are [first, rows); both are multiples of 8.
template <class Tile, int kRows>
__device__ __forceinline__ void copy_simt_lines(std::uint32_t panel, const char* data, std::int64_t stride, int first,
                                                int rows, int count) {
  constexpr int kWarps = Tile::kThreads / 32;
  const int thread = thread_of_cta();
  const int own = thread % 8, k = thread / 8 % 4, warp = thread / 32;  // a warp copies 8 rows of 4 elements of K
  const char* from = data + k * stride + (first + own) * std::int64_t{4};
#pragma unroll
  for (int chunk = 0; chunk < kSimtDepth / 4; ++chunk) {
    const std::uint32_t to = panel + swizzled(own, chunk) + static_cast<std::uint32_t>(k * 4);
#pragma unroll
    for (int group = 0; group < kRows / 8; group += kWarps) {
      const int row = (group + warp) * 8;
      if (row < kRows && first + row < rows && chunk * 4 + k < count) {
        copy_4(to + static_cast<std::uint32_t>(row * kPanelRowBytes), from + row * 4, true);
      }
    }
    from += 4 * stride;
  }
}

// The products of a stage's first `depth` elements of K.
template <class Tile>
__device__ __forceinline__ void add_simt_products(typename Tile::Sums& sums, const float* stage, int depth) {
  const float* const rows = stage + Tile::row(0) * kSimtDepth;
  const float* const columns = stage + Tile::kRows * kSimtDepth;
  // Address of element k of row i, or of column j.
  const auto in_row = [&](int i, int chunk) {
    return rows + i * 4 * kSimtDepth + (chunk ^ Tile::lane_row() ^ (i % 2 * 4)) * 4;
  };
  const auto in_column = [&](int j, int chunk) {
    return columns + Tile::column(j) * kSimtDepth + (chunk ^ Tile::lane_column()) * 4;
  };
#pragma unroll 2
  for (int chunk = 0; chunk < depth / 4; ++chunk) {
    float b[Tile::kThreadColumns][4];
#pragma unroll
    for (int j = 0; j < Tile::kThreadColumns; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(in_column(j, chunk));
      b[j][0] = four.x, b[j][1] = four.y, b[j][2] = four.z, b[j][3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(in_row(i, chunk));
      const float a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int j = 0; j < Tile::kThreadColumns; ++j) sums[i][j] = __fmaf_rn(a[k], b[j][k], sums[i][j]);
      }
    }
  }
#pragma unroll 1
  for (int k = depth / 4 * 4; k < depth; ++k) {
    float b[Tile::kThreadColumns];
#pragma unroll
    for (int j = 0; j < Tile::kThreadColumns; ++j) b[j] = in_column(j, k / 4)[k % 4];
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
      const float a = in_row(i, k / 4)[k % 4];
#pragma unroll
      for (int j = 0; j < Tile::kThreadColumns; ++j) sums[i][j] = __fmaf_rn(a, b[j], sums[i][j]);
    }
  }
}

// Sums runs [first, last) of K, one after another through one pipeline, and calls close(run, sums) after each.
// `operands`:
//   begin(run), end(run)              elements of K; a run may be empty
//   copy(rows, columns, run, k, end)  enqueues copies of [k, min(k + kSimtDepth, end)) to panels in shared memory
// All threads of the CTA call it. `shared` may be used again after the return.
template <class Tile, class Operands, class Close>
__device__ __forceinline__ void add_simt_runs(float* shared, const Operands& operands, int first, int last,
                                              Close close) {
  const std::uint32_t stages = shared_address(shared);
  int next_run = first, next_k = operands.begin(first);  // of the stage that is copied next
  int filled = 0, used = 0;                              // stages
  const auto copy = [&] {
    if (next_run < last) {
      const std::uint32_t rows = stages + static_cast<std::uint32_t>(filled * Tile::kStageBytes);
      const int end = operands.end(next_run);
      operands.copy(rows, rows + Tile::kRows * kPanelRowBytes, next_run, next_k, end);
      next_k += kSimtDepth;
      if (next_k >= end && ++next_run < last) next_k = operands.begin(next_run);
    }
    filled = filled + 1 == Tile::kStages ? 0 : filled + 1;
    copy_commit();  // also past the last stage, because copy_wait() counts groups
  };
#pragma unroll 1
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) copy();

#pragma unroll 1
  for (int run = first; run < last; ++run) {
    typename Tile::Sums sums = {};
    int left = operands.end(run) - operands.begin(run);
#pragma unroll 1
    do {
      copy_wait<Tile::kStages - 2>();
      __syncthreads();  // the stage has arrived, and all warps are done with the previous one, which is filled next
      copy();
      add_simt_products<Tile>(sums, shared + used * (Tile::kStageBytes / 4), min(left, kSimtDepth));
      used = used + 1 == Tile::kStages ? 0 : used + 1;
      left -= kSimtDepth;
    } while (left > 0);
    close(run, sums);
  }
  copy_wait<0>();
  __syncthreads();
}

}  // namespace ringattn::cuda
