// SPDX-License-Identifier: Apache-2.0
// Two registry entries for batched GEMMs on Ampere and newer: `sm80_gemm` uses tensor cores through mma.sync, and
// `sm80_gemm_ordered` has the summation order, and so the bits, of cpu_gemm. bf16 and fp16, dims that are multiples of
// 8, views of any alignment, weights K-major or N-major.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn::sm80 {

// Text for KernelRow::configs.
std::vector<std::string> gemm_configs();
std::vector<std::string> gemm_ordered_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend);
std::unique_ptr<BatchedGemmKernel> make_gemm_ordered(const BatchedGemmSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
