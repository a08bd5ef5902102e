// SPDX-License-Identifier: Apache-2.0
// Arithmetic of CPU attention backward, one function table per SIMD target (common/cpu/tile_ops.hpp).
//
// One tile step serves dQ and (dK, dV). Rows are queries for dQ and keys for dK and dV, columns are the tokens of a
// tile of the other side: keys for dQ, queries of one head for dK and dV.
//
//   S = X · Mᵀ    dP = Y · Nᵀ    dX += dS · M    dY += P · N
//
//            X    Y     M    N     dX    dY
//   dQ       q    dO    K    V     dQ    –
//   dK, dV   k    v     Q    dO    dK    dV
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/cpu/tile_ops.hpp"

namespace ringattn::cpu {

// A tile of one head in fp32: transposed in panels for S and dP, and row by row in panels for dX and dY.
struct BackwardTile {
  float* m_transposed = nullptr;  // [kKeyTile / panel_width, head_dim, panel_width]
  float* n_transposed = nullptr;  // [kKeyTile / panel_width, head_dim_v, panel_width]
  float* m = nullptr;             // [⌈head_dim / panel_width⌉, kKeyTile, panel_width]
  float* n = nullptr;             // [⌈head_dim_v / panel_width⌉, kKeyTile, panel_width]; null: without dY
  float* lse2 = nullptr;          // [kKeyTile] of the columns; null: rows have the stats
  float* delta = nullptr;         // [kKeyTile], as lse2
  bool finite = true;             // no value of m and n is NaN or ∞
};

struct BackwardRows {
  const float* x = nullptr;              // [rows, head_dim]
  const float* y = nullptr;              // [rows, head_dim_v]
  const float* lse2 = nullptr;           // [rows]; null: the tile has the stats
  const float* delta = nullptr;          // [rows], as lse2
  float* dx = nullptr;                   // [rows, row_stride(head_dim)]
  float* dy = nullptr;                   // [rows, row_stride(head_dim_v)]; null with BackwardTile::n
  const ColumnRange* visible = nullptr;  // [rows]: columns of the tile that the row sees; none empty
  int rows = 0;
};

// Arrays are aligned to kVectorAlignment.
struct BackwardOps {
  int lanes;        // floats per vector
  int panel_width;  // columns per panel
  int row_block;    // rows per block of scores

  // As TileOps::widen.
  void (*widen)(const void* source, Dtype dtype, int count, float* target);
  // Packs `count` ≤ kKeyTile rows of M and N.
  void (*pack)(const TileShape& shape, const TileRows& m, const TileRows& n, int count, BackwardTile& tile);
  // Adds the tile to each row's dX and dY. An element's sum over the visible columns is one chain of multiply-adds,
  // ascending from zero. It never is −0, so that sums may start from zeros. scores, dp: [row_block, kKeyTile] scratch.
  void (*add)(const TileShape& shape, const BackwardTile& tile, const BackwardRows& rows, float* scores, float* dp);
  // Σ a · b of `count` elements of `dtype`, a multiple of 8: eight chains, added pairwise.
  float (*dot)(const void* a, const void* b, Dtype dtype, int count);

  // Floats between rows of dX and dY.
  int row_stride(int dim) const { return (dim + lanes - 1) / lanes * lanes; }
  std::size_t transposed_floats(int dim) const { return static_cast<std::size_t>(dim) * kKeyTile; }
  std::size_t panel_floats(int dim) const {
    return static_cast<std::size_t>((dim + panel_width - 1) / panel_width * panel_width) * kKeyTile;
  }
};

// The table of best_tile_ops()'s SIMD target.
const BackwardOps& best_backward_ops();

}  // namespace ringattn::cpu
