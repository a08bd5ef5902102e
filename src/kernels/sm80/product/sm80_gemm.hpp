// SPDX-License-Identifier: Apache-2.0
// Two kernel rows of products of heads with their matrices, Ampere and newer: `sm80_gemm` on tensor cores through
// mma.sync, and `sm80_gemm_ordered`, whose sums have the order of cpu_gemm, and so its bits. bf16 and fp16, dims that
// are multiples of 8, views of any alignment, matrices either way round.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/batched_gemm.hpp"

namespace ringattn::sm80 {

// See KernelRow::configs.
std::vector<std::string> gemm_configs();
std::vector<std::string> gemm_ordered_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend);
std::unique_ptr<BatchedGemmKernel> make_gemm_ordered(const BatchedGemmSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
