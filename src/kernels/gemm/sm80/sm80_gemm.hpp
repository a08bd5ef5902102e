// SPDX-License-Identifier: Apache-2.0
// Two registry entries for batched GEMMs on Ampere and newer, with their tiles and compiled kernels: `sm80_gemm` uses
// tensor cores through mma.sync, and `sm80_gemm_ordered` has the summation order, and so the bits, of cpu_gemm. bf16
// and fp16, dims that are multiples of 8, views of any alignment, weights K-major or N-major.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/cuda/panels.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/gemm/cuda/gemm_params.hpp"

namespace ringattn::sm80 {

// Text for KernelRow::configs.
std::vector<std::string> gemm_configs();
std::vector<std::string> gemm_ordered_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend);
std::unique_ptr<BatchedGemmKernel> make_gemm_ordered(const BatchedGemmSpec& spec, Backend& backend);

// The compiled kernels of sm80_gemm (kernels/instances.cmake), and their tiles.

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

// The compiled kernel of sm80_gemm_ordered (gemm_ordered.cu).

// A CTA computes kOrderedTileM rows of out. It computes kSmallOrderedTileN columns if N ≤ kSmallN, else
// kLargeOrderedTileN.
inline constexpr int kOrderedTileM = 128;
inline constexpr int kSmallOrderedTileN = 32;
inline constexpr int kLargeOrderedTileN = 128;
inline constexpr int kSmallN = 64;

extern const cuda::GemmLauncher gemm_ordered_bf16;
extern const cuda::GemmLauncher gemm_ordered_fp16;

}  // namespace ringattn::sm80
