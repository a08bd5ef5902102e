// SPDX-License-Identifier: Apache-2.0
// Tiles and parameters of the int4 wgmma kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/linear/cuda/quantized_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kInt4ManyRows = 128;     // of x, in a tile of the many-rows kernel
inline constexpr int kInt4MaxFewRows = 64;    // in a tile of the few-rows kernel
inline constexpr int kInt4FewRows = 512;      // maximum rows of a task for which that kernel may be chosen
inline constexpr int kInt4PanelColumns = 64;  // of x: a panel's row has 128 bytes

// Rows of x in a tile: 8, 16, 32 or 64 by the few-rows kernel, 128 by the many-rows kernel.
int choose_int4_rows(int rows, int columns, int matrices, int groups, int multiprocessors);

// Bytes of Int4Gemm::partials, and elements of ::counters, that any task of up to `rows` rows needs.
std::int64_t int4_partial_bytes(std::int64_t rows, std::int64_t columns, int matrices, std::int64_t features,
                                bool leaves, int multiprocessors);
std::int64_t int4_counters(std::int64_t rows, std::int64_t columns);

struct HopperInt4 {
  cuda::Int4Gemm gemm;
  CUtensorMap x;  // box [rows of a tile (of a pair: half), 64 of K]
  std::int32_t row_tiles;
  std::int32_t column_tiles;  // few rows: of 64 columns; many rows: of 128 sums
};

// Whether TMA can read x.
bool can_map_int4(const cuda::Int4Gemm& params);
HopperInt4 map_int4(const cuda::Int4Gemm& params, int tile_rows, int box_rows, int tile_columns);

struct Int4Launcher {
  void (*prepare)();
  // tile_rows: as choose_int4_rows() returns.
  void (*launch)(const cuda::Int4Gemm& params, int tile_rows, Stream stream);
};
extern const Int4Launcher int4_bf16;
extern const Int4Launcher int4_fp16;

}  // namespace ringattn::sm90
