// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm90_gemm`: products of heads with their matrices by wgmma and TMA, H100 and H200. bf16 and fp16,
// dims that are multiples of 8, matrices either way round. Views of any alignment: where rows or matrices don't lie at
// multiples of 16 bytes, threads copy them, more slowly, and every bit of out is the same.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/batched_gemm.hpp"

namespace ringattn::sm90 {

// See KernelRow::configs.
std::vector<std::string> gemm_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
