// SPDX-License-Identifier: Apache-2.0
// Tiles and parameters of the int8 wgmma kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/linear/cuda/quantized_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kInt8TileSums = 128;    // rows of W of a tile: gated, 64 of the gate and 64 of up
inline constexpr int kInt8BlockBytes = 128;  // of K, in a pipeline stage
inline constexpr int kInt8MaxTileRows = 256;

// How a task is divided: tiles of rows of x, and the parts of K that CTAs sum.
struct Int8Form {
  int tile_rows = 0;  // 8, 16, 32, 64, 128, or 256 by CTA pairs
  int splits = 1;
};
Int8Form choose_int8_form(int rows, int columns, int matrices, int features, int multiprocessors);

// Elements of Int8Gemm::tile_sums and ::counters that any task of up to `rows` rows needs.
std::int64_t int8_tile_sums(std::int64_t rows, int multiprocessors);
std::int64_t int8_counters(int multiprocessors);

struct HopperInt8 {
  cuda::Int8Gemm gemm;
  CUtensorMap x;           // box [rows of a tile (of a pair: half), 128 bytes of K]
  CUtensorMap weights[2];  // box [64 rows, 128 bytes of K]
  std::int32_t row_tiles, column_tiles, blocks, splits;
};

// Whether TMA can read the weights.
bool can_map_int8(const cuda::Int8Gemm& params);
void prepare_int8_wgmma();
void launch_int8_wgmma(const cuda::Int8Gemm& params, Int8Form form, Stream stream);

}  // namespace ringattn::sm90
