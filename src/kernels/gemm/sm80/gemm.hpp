// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm80_gemm (kernels/instances.cmake), and their tiles.
#pragma once

#include "kernels/common/cuda/panels.hpp"
#include "kernels/gemm/cuda/gemm_params.hpp"

namespace ringattn::sm80 {

// A warp computes 32 rows and half of a tile's columns.
struct GemmConfig {
  int rows = 0;  // per tile
  int stages = 0;

  constexpr int threads() const { return rows / 32 * 2 * 32; }
  constexpr int stage_bytes() const { return (rows + cuda::kGemmTileN) * cuda::kPanelRowBytes; }
  constexpr int shared_bytes() const { return stages * stage_bytes(); }
};

// For up to kFewRows rows, and for more. Each fits into the 99 KiB that every device from sm_80 on provides per CTA.
inline constexpr int kFewRows = 64;
inline constexpr GemmConfig kFewRowsConfig{64, 4};
inline constexpr GemmConfig kManyRowsConfig{128, 3};
static_assert(kFewRowsConfig.shared_bytes() <= 99 * 1024 && kManyRowsConfig.shared_bytes() <= 99 * 1024);

extern const cuda::GemmLauncher gemm_bf16;
extern const cuda::GemmLauncher gemm_fp16;

}  // namespace ringattn::sm80
