// SPDX-License-Identifier: Apache-2.0
// The batched GEMM kernel `sm90_gemm`, with wgmma and TMA, for H100 and H200. It multiplies the rows of each head by
// that head's matrix. bf16 and fp16, dims that are multiples of 8, weights [N, K] or transposed. Views may have any
// alignment: operands that are not aligned to 16 bytes are copied by threads, which is slower and gives the same bits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn::sm90 {

// See KernelRow::configs.
std::vector<std::string> gemm_configs();

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
