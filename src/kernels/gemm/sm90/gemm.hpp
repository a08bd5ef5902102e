// SPDX-License-Identifier: Apache-2.0
// Tile configurations and kernel parameters of sm90_gemm. kernels/instances.cmake lists the instantiations, and
// gemm/cuda/cuda_gemm.hpp launches them.
#pragma once

#include <cuda.h>

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/gemm/cuda/gemm_params.hpp"

namespace ringattn::sm90 {

struct GemmConfig {
  int warpgroups = 0;  // consumer warpgroups
  int row_blocks = 0;  // row blocks of 64 per warpgroup and tile
  int stages = 0;
  int ctas = 0;            // CTAs per SM
  int producer_warps = 1;  // producer warps; 1: TMA, else the warps copy with cp.async

  constexpr int rows() const { return 64 * warpgroups * row_blocks; }  // M of a tile
  constexpr int threads() const { return 128 * warpgroups + 32 * producer_warps; }
  constexpr int stage_bytes() const { return (rows() + cuda::kGemmTileN) * cuda::kPanelRowBytes; }
  // Stages are aligned to 1,024 bytes. Two mbarriers per stage follow them.
  constexpr int shared_bytes() const { return cuda::aligned_shared_bytes(stages * (stage_bytes() + 16), 1024); }
};

inline constexpr GemmConfig kSmallMConfig{1, 1, 4, 2};   // M up to 64
inline constexpr GemmConfig kMediumMConfig{2, 1, 3, 2};  // larger M; two CTAs per SM hide memory latency
// M from 1,024 on: each tile of weights is loaded for twice the rows.
inline constexpr GemmConfig kLargeMConfig{2, 2, 4, 1};
inline constexpr GemmConfig kUnalignedConfig{2, 1, 6, 1, 4};  // any M, for views that TMA cannot read
// An SM has 228 KiB of shared memory. A CTA can have 227 KiB, and each CTA takes 1 KiB more than it requests.
static_assert(2 * (kSmallMConfig.shared_bytes() + 1024) <= 228 * 1024);
static_assert(2 * (kMediumMConfig.shared_bytes() + 1024) <= 228 * 1024);
static_assert(kLargeMConfig.shared_bytes() <= 227 * 1024);
static_assert(kUnalignedConfig.shared_bytes() <= 227 * 1024);

// The tile configuration of a GEMM whose operands TMA can read.
const GemmConfig& choose_gemm(const cuda::GemmParams& p);

struct HopperGemm {
  cuda::GemmParams gemm;
  CUtensorMap rows;     // box [rows of a tile, 64 of K]
  CUtensorMap weights;  // box [128 of N, 64 of K]; transposed: [64 of K, 64 of N]
};

// can_map_gemm: true if TMA can read both operands. map_gemm: makes their tensor maps.
bool can_map_gemm(const cuda::GemmParams& p);
HopperGemm map_gemm(const cuda::GemmParams& p, const GemmConfig& config);

extern const cuda::GemmLauncher gemm_bf16;
extern const cuda::GemmLauncher gemm_fp16;

}  // namespace ringattn::sm90
