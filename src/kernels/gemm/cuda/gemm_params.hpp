// SPDX-License-Identifier: Apache-2.0
// Parameters of a launch of a batched GEMM kernel, and how the host reaches the compiled kernels.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/memory.hpp"

namespace ringattn::cuda {

// Rows of 16-bit elements for each head. The elements of a row are contiguous. Strides count bytes.
template <class Byte>
struct GemmOperand {
  Byte* data;
  std::int64_t stride;       // from one row to the next
  std::int64_t head_stride;  // 0: all heads share the rows
  std::int32_t heads;        // number of heads with rows of their own
  bool aligned;              // every row of every head is aligned to 16 bytes
};

struct GemmParams {
  GemmOperand<const char> rows;     // A: [row_count, heads, dim_k]
  GemmOperand<const char> weights;  // B, for each head [dim_n, dim_k], or, if transposed, [dim_k, dim_n]
  GemmOperand<char> out;            // D: [row_count, heads, dim_n]
  std::int32_t row_count;           // M, at least 1
  std::int32_t heads;
  std::int32_t dim_k;
  std::int32_t dim_n;
  bool transposed;  // weights are [dim_k, dim_n] (N-major)
  Dtype dtype;
  std::int32_t multiprocessors;
};

inline constexpr int kGemmTileN = 128;    // columns of out per tile
inline constexpr int kGemmTileK = 64;     // K per pipeline stage: one panel
inline constexpr int kMinGemmTileM = 64;  // minimum rows of a tile, for the maximum number of tiles of a launch

struct GemmLauncher {
  // Loads the kernels on the current device, so that no launch has to load them while peers wait.
  void (*prepare)();
  // Enqueues the GEMM of all rows of `params`. Throws if the launch fails.
  void (*launch)(const GemmParams& params, Stream stream);
};

constexpr std::int64_t column_tiles(const GemmParams& p) { return (p.dim_n + kGemmTileN - 1) / kGemmTileN; }
// Output tiles of `tile_rows` rows.
constexpr std::int64_t gemm_tiles(const GemmParams& p, int tile_rows) {
  return (std::int64_t{p.row_count} + tile_rows - 1) / tile_rows * p.heads * column_tiles(p);
}

}  // namespace ringattn::cuda
