// SPDX-License-Identifier: Apache-2.0
// Parameters of the kernels of linear layers with quantized weights, shared by host and device.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/host_device.hpp"
#include "base/memory.hpp"
#include "kernels/linear/cuda/linear_gemm.hpp"
#include "kernels/linear/linear_constants.hpp"

namespace ringattn::cuda {

// Where the sums of a task are written, and how y is computed from them.
struct QuantizedOutput {
  char* y;                // [rows, columns]; null: sums are written instead
  std::int64_t y_stride;  // bytes
  void* sums;             // [rows, matrices · columns]: fp32, or int32 for int8
  std::int32_t rows;      // of x and y
  std::int32_t columns;   // N
  std::int32_t matrices;  // 2: gated
  Dtype dtype;            // of y and biases
  LinearActivation activation;
  const float* row_scales;  // int8: [rows]
  const float* scales[2];   // int8: [columns] for each matrix
  const void* bias[2];      // [columns] for each matrix, or null

  // Number of columns of y whose sums are in a tile with `width` sums per row. A gated tile has the sums of the gate
  // matrix, then those of the up matrix.
  RINGATTN_HOST_DEVICE int columns_of_tile(int width) const { return width / matrices; }
};

// Rows of x, or of W, in global memory.
struct QuantizedRows {
  const char* data;
  std::int64_t stride;  // bytes
  bool aligned;         // every row is aligned to 16 bytes
};

// ---- int8 ----

// Bytes of a row of quantized x: K padded with zeros to whole chunks of 16.
constexpr std::int64_t int8_row_bytes(std::int64_t features) { return (features + 15) / 16 * 16; }

struct Int8Rows {
  QuantizedRows x;  // [rows, features], bf16 or fp16
  Dtype dtype;
  std::int32_t rows;
  std::int32_t features;
  // max |x| of the devices' parts of K, [parts, rows]. Null: found here.
  const float* absmax;
  std::int64_t absmax_stride;
  std::int32_t absmax_parts;
  float* found;            // for find_absmax(): [rows]; non-null: nothing is quantized
  signed char* quantized;  // [rows, int8_row_bytes(features)]
  float* scales;           // [rows]
};
// Finds each row's max |x|, and quantizes it.
void launch_int8_rows(const Int8Rows& params, Stream stream);

struct Int8Gemm {
  const signed char* x;  // [rows, int8_row_bytes(features)]
  QuantizedRows weights[2];
  std::int32_t features;  // of this device
  QuantizedOutput out;
  std::int32_t multiprocessors;
  // Sums of tiles whose K is shared by several CTAs, and the number of CTAs that have added theirs. Zero between tasks.
  std::int32_t* tile_sums;
  std::uint32_t* counters;
};

// By mma.sync, for all weights.
void prepare_int8_mma();
void launch_int8_mma(const Int8Gemm& params, Stream stream);

// ---- int4 ----
// Packed weights are blocks of 64 rows of W and one group, [matrix][row tile][group]. A block holds
//   codes   [2 halves of the group][128 threads][4 steps of 16 elements][8 elements]
//   scales  fp32 [64]
//   zeros   uint8 [64], and 64 bytes of padding: bulk copies from addresses that are no multiples of 128 are slower
// so that a thread's 16 bytes of codes are its A fragments of four m64k16 (wgmma) or m16k16 (mma.sync) products.
// Element i < 4 of a step is the lower half of register i of the fragment, element 4 + i the upper half. Rows after the
// last are zero.
inline constexpr int kInt4TileRows = 64;
inline constexpr int kInt4CodeBytes = kInt4TileRows * static_cast<int>(kInt4Group) / 2;
inline constexpr int kInt4ScalesAt = kInt4CodeBytes;
inline constexpr int kInt4ZerosAt = kInt4ScalesAt + kInt4TileRows * 4;
inline constexpr int kInt4UsedBytes = kInt4ZerosAt + kInt4TileRows;
inline constexpr int kInt4BlockBytes = (kInt4UsedBytes + 127) / 128 * 128;
constexpr std::int64_t int4_row_tiles(std::int64_t columns) { return (columns + kInt4TileRows - 1) / kInt4TileRows; }

// Packs a matrix, which is described by LinearMatrix (linear.hpp).
struct Int4Pack {
  const unsigned char* data;  // [columns, K / 2]
  std::int64_t row_stride;
  const float* scales;         // [columns, groups]
  const unsigned char* zeros;  // [columns, groups], or null
  std::int64_t group_stride;
  std::int32_t columns;
  std::int32_t groups;
  char* packed;
};
void launch_int4_pack(const Int4Pack& params, Stream stream);

struct Int4Gemm {
  QuantizedRows x;           // [rows, K of the chains], bf16 or fp16
  const char* packed;        // of all groups of this device
  std::int32_t groups;       // of this device
  std::int32_t first_group;  // the chains' first
  LinearChains chains;
  QuantizedOutput out;
  std::int32_t multiprocessors;
  float* partials;          // sums of chains, or of levels of the tree
  std::uint32_t* counters;  // zero between tasks
};

void prepare_int4_mma();
void launch_int4_mma(const Int4Gemm& params, Stream stream);

}  // namespace ringattn::cuda
