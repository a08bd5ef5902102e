// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/sm80/sm80_gemm.hpp"

#include <fmt/format.h>

#include "kernels/gemm/cuda/cuda_gemm.hpp"

namespace ringattn::sm80 {

namespace {

std::string describe(const GemmConfig& config) {
  return fmt::format("tile {}x{}, {} warps, {} stages, {:.1f} KiB", config.rows, cuda::kGemmTileN,
                     config.threads() / 32, config.stages, static_cast<double>(config.shared_bytes()) / 1024.0);
}

}  // namespace

std::vector<std::string> gemm_configs() {
  return {fmt::format("up to {} rows: {}", kFewRows, describe(kFewRowsConfig)),
          fmt::format("more rows: {}", describe(kManyRowsConfig))};
}

std::vector<std::string> gemm_ordered_configs() {
  return {fmt::format("up to {} columns: tile {}x{}", kSmallN, kOrderedTileM, kSmallOrderedTileN),
          fmt::format("more columns: tile {}x{}", kOrderedTileM, kLargeOrderedTileN)};
}

std::unique_ptr<BatchedGemmKernel> make_gemm_ordered(const BatchedGemmSpec& spec, Backend& backend) {
  return cuda::make_cuda_gemm(spec, spec.dtype == Dtype::kBf16 ? gemm_ordered_bf16 : gemm_ordered_fp16, backend);
}

std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend) {
  return cuda::make_cuda_gemm(spec, spec.dtype == Dtype::kBf16 ? gemm_bf16 : gemm_fp16, backend);
}

}  // namespace ringattn::sm80
