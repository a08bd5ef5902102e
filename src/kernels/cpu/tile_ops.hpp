// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the CPU fold, one table of functions per SIMD target: pack a key tile, fold it into rows, merge
// groups of tiles.
// The target is chosen at run time (Highway); everything outside this table is ordinary C++ and moves no bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/attention.hpp"

namespace ringattn::cpu {

inline constexpr int kKeyTile = 128;
inline constexpr int kMaxHeadDim = 576;              // of keys that latents make with their rotary part
inline constexpr std::size_t kVectorAlignment = 64;  // of every array in TileOps' signatures

// What the arithmetic needs of a AttentionSpec.
struct TileShape {
  Dtype dtype = Dtype::kBf16;
  int head_dim = 0;
  int head_dim_v = 0;
  float softmax_scale = 1.0F;
  float softcap = 0.0F;
};

// One head's rows of a tile as they lie in memory: row i is row i % 2^page_run_log2 of piece i / 2^page_run_log2.
inline constexpr int kMaxPageRuns = kKeyTile / kMinPageRunKeys;
struct TileRows {
  const std::byte* page_runs[kMaxPageRuns] = {};
  std::int64_t stride = 0;  // bytes from row to row of a piece
  int page_run_log2 = 62;   // one piece

  const std::byte* at(std::int64_t row) const {
    return page_runs[row >> page_run_log2] + (row & ((std::int64_t{1} << page_run_log2) - 1)) * stride;
  }
};

// One head's keys and values of one tile in fp32, cut into panels of TileOps::panel_width columns, so that the inner
// loop of both products reads memory in order.
struct PackedTile {
  float* k = nullptr;    // [kKeyTile / panel_width, head_dim, panel_width]: transposed
  float* v = nullptr;    // [⌈head_dim_v / panel_width⌉, kKeyTile, panel_width]
  bool v_finite = true;  // no value of the tile is NaN or ∞
};

// What a row has folded: of one group of key tiles, or of several, merged (kernels/merge.hpp).
struct Partial {
  float offset = 0.0F;   // subtracted from the scores
  float sum = 0.0F;      // Σ exp(x − offset)
  float* acc = nullptr;  // [head_dim_v]: Σ exp(x − offset) · v
};

// Rows that share a kv head, with the partials of their open groups.
struct RowBatch {
  const float* q = nullptr;              // [rows, head_dim]
  float* offset = nullptr;               // [rows]
  float* sum = nullptr;                  // [rows]
  float* acc = nullptr;                  // [rows, o_stride()]
  const ColumnRange* visible = nullptr;  // [rows]: of the tile, that the row sees; none empty
  int rows = 0;
};

struct TileOps {
  const char* target;  // Highway's name of it, e.g. "AVX2"
  int lanes;           // floats of a vector
  int panel_width;     // columns of a panel
  int row_block;       // rows of a score block
  // What one thread reaches, roughly, where nobody has measured.
  double flops_per_second;

  // Elements (of `dtype`) to fp32; count is a multiple of 8.
  void (*widen)(const void* source, Dtype dtype, int count, float* target);
  // Packs the first `keys` rows of k and v.
  void (*pack)(const TileShape& shape, const TileRows& k, const TileRows& v, int keys, PackedTile& tile);
  // (m, l, O) ← fold((m, l, O), tile) for each row of the batch. scores: [row_block, kKeyTile] scratch.
  void (*attend)(const TileShape& shape, const PackedTile& tile, const RowBatch& rows, float* scores);
  // The merge step: `group` joins what comes before it in the row. Neither O need be aligned.
  void (*merge)(int head_dim_v, const Partial& group, Partial& row);

  // Floats from one row of O to the next, and in a packed tile.
  int o_stride(int head_dim_v) const { return (head_dim_v + lanes - 1) / lanes * lanes; }
  std::size_t k_floats(int head_dim) const { return static_cast<std::size_t>(head_dim) * kKeyTile; }
  std::size_t v_floats(int head_dim_v) const {
    return static_cast<std::size_t>((head_dim_v + panel_width - 1) / panel_width * panel_width) * kKeyTile;
  }
};

// The table of the best SIMD target that this machine has (and that hwy::DisableTargets leaves).
const TileOps& best_tile_ops();

}  // namespace ringattn::cpu
