// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm90_gemm (gemm_*.cu), their tiles, and what a launch is given.
#pragma once

#include <cuda.h>

#include "kernels/cuda/device/panels.hpp"
#include "kernels/cuda/gemm_params.hpp"

namespace ringattn::sm90 {

struct GemmConfig {
  int warpgroups = 0;  // that multiply
  int blocks = 0;      // of 64 rows that each of them has of a tile
  int stages = 0;
  int ctas = 0;         // of a multiprocessor
  int fetch_warps = 1;  // 1: the copy engine fetches; else so many warps copy

  constexpr int rows() const { return 64 * warpgroups * blocks; }  // of a tile
  constexpr int threads() const { return 128 * warpgroups + 32 * fetch_warps; }
  constexpr int stage_bytes() const { return (rows() + cuda::kGemmTileN) * cuda::kPanelRowBytes; }
  // Stages begin at a multiple of 1,024 bytes; behind them are two barriers each.
  constexpr int shared_bytes() const { return 1024 + stages * (stage_bytes() + 16); }
};

inline constexpr GemmConfig kFewRowsConfig{1, 1, 4, 2};       // up to 64 rows
inline constexpr GemmConfig kSomeRowsConfig{2, 1, 3, 2};      // more; where memory is waited for, two CTAs hide more
inline constexpr GemmConfig kManyRowsConfig{2, 2, 4, 1};      // many: a tile's weights are read for twice the rows
inline constexpr GemmConfig kUnalignedConfig{2, 1, 6, 1, 4};  // any number; views that threads read
// A CTA gets 227 KiB of a multiprocessor's 228, and each of its CTAs takes 1 KiB more than it asks for.
static_assert(2 * (kFewRowsConfig.shared_bytes() + 1024) <= 228 * 1024);
static_assert(2 * (kSomeRowsConfig.shared_bytes() + 1024) <= 228 * 1024);
static_assert(kManyRowsConfig.shared_bytes() <= 227 * 1024);
static_assert(kUnalignedConfig.shared_bytes() <= 227 * 1024);

// The configuration for a product whose rows and weights the copy engine reads.
const GemmConfig& choose_gemm(const cuda::GemmParams& p);

struct HopperGemm {
  cuda::GemmParams gemm;
  CUtensorMap rows;     // boxes of a tile's rows × a panel
  CUtensorMap weights;  // of a tile's columns × a panel; transposed, of 64 rows × a panel
};

// Whether the copy engine reads the rows and weights; and the tensor maps, where it does.
bool can_map_gemm(const cuda::GemmParams& p);
HopperGemm map_gemm(const cuda::GemmParams& p, const GemmConfig& config);

extern const cuda::GemmLauncher gemm_bf16;
extern const cuda::GemmLauncher gemm_fp16;

}  // namespace ringattn::sm90
