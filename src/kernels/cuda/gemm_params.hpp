// SPDX-License-Identifier: Apache-2.0
// What a launch of a GPU kernel for products of heads is given, and how the host reaches the compiled kernels.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/memory.hpp"

namespace ringattn::cuda {

// Rows of 16-bit elements of heads; the elements of a row lie one behind the other. Strides count bytes.
template <class Byte>
struct GemmOperand {
  Byte* data;
  std::int64_t stride;       // from a row to the next
  std::int64_t head_stride;  // 0: all heads share the rows
  std::int32_t heads;        // that have rows of their own
  bool aligned;              // every row of every head, to 16 bytes
};

struct GemmParams {
  GemmOperand<const char> rows;     // [row_count, heads, inner]
  GemmOperand<const char> weights;  // of each head [outer, inner], or, where they lie transposed, [inner, outer]
  GemmOperand<char> out;            // [row_count, heads, outer]
  std::int32_t row_count;           // at least one
  std::int32_t heads;
  std::int32_t dim_k;
  std::int32_t dim_n;
  bool transposed;  // the elements of a row of weights are those of one number of the sum
  Dtype dtype;
  std::int32_t multiprocessors;
};

inline constexpr int kGemmTileN = 128;    // of out in a tile
inline constexpr int kGemmTileK = 64;     // numbers that are has_merged over at a time: a panel
inline constexpr int kMinGemmTileM = 64;  // of a tile, so launches know how many tiles there are at most

struct GemmLauncher {
  // Makes the kernels ready on the current device, so that no launch has to load them while peers wait.
  void (*prepare)();
  // Enqueues the product of all rows of `params`. Throws what the launch fails with.
  void (*launch)(const GemmParams& params, Stream stream);
};

constexpr std::int64_t column_tiles(const GemmParams& p) { return (p.dim_n + kGemmTileN - 1) / kGemmTileN; }
// Tiles of so many rows that the product is cut into.
constexpr std::int64_t gemm_tiles(const GemmParams& p, int tile_rows) {
  return (std::int64_t{p.row_count} + tile_rows - 1) / tile_rows * p.heads * column_tiles(p);
}

}  // namespace ringattn::cuda
