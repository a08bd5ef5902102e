// SPDX-License-Identifier: Apache-2.0
// Arithmetic of `cpu_gemm`, one function table per SIMD target like tile_ops.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn::cpu {

// One head's weight matrix in memory, [dim_n, dim_k]. Strides count bytes, and one of them is the size of an element.
struct GemmMatrix {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  std::int64_t dim_n = 0;
  std::int64_t dim_k = 0;
  std::int64_t n_stride = 0;
  std::int64_t k_stride = 0;
};

// Input and output rows of one head.
struct GemmRows {
  const float* rows = nullptr;  // [count, dim_k]
  std::int64_t count = 0;
  std::byte* out = nullptr;     // [count, dim_n] of `dtype`
  std::int64_t out_stride = 0;  // bytes from row to row
  Dtype dtype = Dtype::kBf16;
};

// `panels` are aligned to kVectorAlignment (tile_ops.hpp). Dims are multiples of 8.
struct GemmOps {
  int panel_width;  // columns of a panel

  // Packs a matrix to fp32 panels, [⌈dim_n / panel_width⌉, dim_k, panel_width]. Columns after the last are zero.
  void (*pack)(const GemmMatrix& matrix, float* panels);
  // Each element: one chain of multiply-adds over dim_k in order, from zero, and one rounding.
  void (*multiply)(const GemmRows& rows, std::int64_t dim_n, std::int64_t dim_k, const float* panels);

  std::size_t panel_floats(std::int64_t dim_n, std::int64_t dim_k) const {
    return static_cast<std::size_t>((dim_n + panel_width - 1) / panel_width * panel_width * dim_k);
  }
};

// The product of one head's packed rows and its matrix, by AMX tiles (amx_gemm-inl.hpp), in bf16.
struct GemmTiles {
  const std::byte* rows = nullptr;  // [⌈count / 16⌉, rows_stride bytes] as pack_rows() wrote it
  std::int64_t rows_stride = 0;
  std::int64_t count = 0;
  GemmMatrix matrix;
  const std::byte* packed = nullptr;  // as pack_transposed() wrote it; null: rows of `matrix` are dense in memory
  std::byte* scratch = nullptr;       // 2 KiB for each 32 elements of dim_k
  std::byte* out = nullptr;           // [count, dim_n]
  std::int64_t out_stride = 0;        // bytes from row to row
};

struct GemmTileOps {
  // Packs 16 rows to [⌈bytes / 64⌉, 1 KiB]. A null row is packed as zeros.
  void (*pack_rows)(const std::byte* const* rows, std::int64_t bytes, std::byte* tiles);
  // Packs a matrix whose n_stride is that of an element: [⌈dim_n / 32⌉, ⌈dim_k / 32⌉, 2 KiB].
  void (*pack_transposed)(const GemmMatrix& matrix, std::byte* tiles);
  void (*multiply)(const GemmTiles& gemm);
};

inline constexpr std::int64_t kGemmTileRows = 16;     // that are packed together
inline constexpr std::int64_t kGemmTileColumns = 32;  // that are packed together
inline constexpr std::int64_t kGemmTileDepth = 32;    // elements of K in a tile
inline constexpr std::int64_t kGemmTileBytes = 1024;

// The table of best_tile_ops()'s SIMD target.
const GemmOps& best_gemm_ops();
// Null: the processor, the kernel or the target lacks AMX tiles of bf16.
const GemmTileOps* gemm_tile_ops();

}  // namespace ringattn::cpu
