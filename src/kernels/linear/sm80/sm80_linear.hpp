// SPDX-License-Identifier: Apache-2.0
// The linear kernels of Ampere and newer GPUs for floating-point weights: `sm80_linear` with mma.sync, bf16 and fp16
// (linear/cuda/mma_linear.cu), and `sm80_linear_simt`, fp32 (linear/cuda/simt_linear.cu). Every activation, K and N of
// any size, views of any alignment.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn::sm80 {

// Text for KernelRow::configs.
std::vector<std::string> linear_configs();
std::vector<std::string> simt_linear_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<LinearKernel> make_linear(const LinearSpec& spec, Backend& backend);
std::unique_ptr<LinearKernel> make_simt_linear(const LinearSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
