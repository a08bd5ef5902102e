// SPDX-License-Identifier: Apache-2.0
// Arithmetic of `cpu_linear`, one function table per SIMD target like tile_ops.hpp. A panel is panel_width columns of
// sums, from as many rows of a weight matrix.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.hpp"

namespace ringattn::cpu {

// Elements [k, k + depth) of some rows of a weight matrix. kInt4: within one group.
struct LinearPanelSource {
  const LinearMatrix* matrix = nullptr;
  WeightFormat format = WeightFormat::kFloat;
  Dtype dtype = Dtype::kBf16;
  std::int64_t row = 0;   // the panel's first
  std::int64_t rows = 0;  // at most panel_width
  std::int64_t k = 0;
  std::int64_t depth = 0;
};

// How the sum of a chain of multiply-adds from zero is used.
enum class LinearSum {
  kAdded,    // fp32: sums += chain
  kScaled,   // fp32: sums = fma(scales[column], chain, sums)
  kInteger,  // int32: sums += chain, which is an integer (without tiles: below 2^24)
};

struct LinearPanelGemm {
  const float* x = nullptr;  // [rows, x_stride], at the chain's first element
  std::int64_t x_stride = 0;
  std::int64_t rows = 0;
  const float* panel = nullptr;  // [depth, panel_width]
  std::int64_t depth = 0;
  LinearSum sum = LinearSum::kAdded;
  const float* scales = nullptr;  // [panel_width]
  void* sums = nullptr;           // [rows, panel_width]
};

// The product of some rows of x and at most 32 columns, by AMX tiles (gemm/cpu/amx_gemm-inl.hpp).
struct LinearTileGemm {
  LinearPanelSource source;
  const std::byte* x = nullptr;  // [⌈rows / 16⌉, x_stride bytes] as pack_rows() wrote it, at source.k
  std::int64_t x_stride = 0;
  std::int64_t rows = 0;
  LinearSum sum = LinearSum::kAdded;
  const float* scales = nullptr;  // [32]
  void* sums = nullptr;           // [rows, sum_stride]
  std::int64_t sum_stride = 0;
  std::byte* scratch = nullptr;  // 2 KiB for each 64 bytes of depth in the tiles' elements
};

// Sums of the tree's nodes (linear.hpp) for the columns of one panel. Null for nodes whose sum is that of their
// children. −0 for leaves without a sum.
struct LinearNodeSums {
  const float* node[kLinearNodes] = {};  // at the panel's first column of row 0
  std::int64_t row_stride = 0;           // elements
  std::int64_t row = 0;                  // the row to read
  std::int64_t columns = 0;              // of the panel that exist
};

// Makes the columns of a panel of y.
struct LinearEpilogue {
  Dtype dtype = Dtype::kBf16;
  LinearActivation activation = LinearActivation::kNone;
  bool gated = false;
  // Per matrix, [panel_width]. Columns without a bias have −0, which changes nothing.
  const float* bias[2] = {};
  // kInt8: scales of the columns, [panel_width], and of the row of x. Sums are int32 in node 1. Null for other formats.
  const float* scales[2] = {};
  float x_scale = 1.0F;
  std::byte* out = nullptr;  // the row's columns of the panel
};

// The gradients of z for one row, as LinearGradientTask has them. All arrays have `columns` elements.
struct LinearRowGradient {
  Dtype dtype = Dtype::kBf16;
  LinearActivation activation = LinearActivation::kNone;
  const float* dy = nullptr;
  const float* z = nullptr;
  const float* u = nullptr;  // null: not gated
  std::int64_t columns = 0;
  std::byte* dz = nullptr;
  std::byte* du = nullptr;
};

// Panels, sums and scales are aligned to kVectorAlignment (tile_ops.hpp), except sums in LinearNodeSums.
struct LinearOps {
  int panel_width;

  // fp32 [depth, panel_width], with room for 3 rows more. kInt4: q − zero. Columns without a row are zero.
  void (*pack)(const LinearPanelSource& source, float* panel);
  void (*multiply)(const LinearPanelGemm& gemm);
  // to[i] += from[i]
  void (*add)(const float* from, std::int64_t count, float* to);
  // Stores the sum of a node, [columns].
  void (*join)(const LinearNodeSums& sums, int node, float* to);
  void (*finish)(const LinearNodeSums* sums, const LinearEpilogue& epilogue);  // gated: two sums
  // max |x|, or NaN if any value is NaN or ∞.
  float (*absmax)(const float* x, std::int64_t count);
  // x becomes its quantized values; returns the scale (linear.hpp).
  float (*quantize)(float absmax, std::int64_t count, float* x);
  void (*activation_gradient)(const LinearRowGradient& row);
};

// Products by AMX tiles, of bf16 (x in bf16, weights kFloat or kInt4), or of int8 (quantized x).
struct LinearTileOps {
  // Packs 16 rows of x to [⌈bytes / 64⌉, 1 KiB]. A null row is packed as zeros.
  void (*pack_rows)(const std::byte* const* rows, std::int64_t bytes, std::byte* tiles);
  // Rounded values below 128 as int8.
  void (*narrow)(const float* values, std::int64_t count, std::int8_t* to);
  void (*multiply)(const LinearTileGemm& gemm);
};

inline constexpr std::int64_t kLinearTileRows = 16;     // of x that are packed together
inline constexpr std::int64_t kLinearTileColumns = 32;  // of LinearTileGemm

// The table of best_tile_ops()'s SIMD target.
const LinearOps& best_linear_ops();
// Null if products are chains of multiply-adds in fp32: for dtypes, processors and targets without tiles.
const LinearTileOps* linear_tile_ops(Dtype dtype, WeightFormat format);

}  // namespace ringattn::cpu
