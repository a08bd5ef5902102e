// SPDX-License-Identifier: Apache-2.0
// The linear kernel of Ampere and newer GPUs with mma.sync (linear/cuda/mma_linear.cu): bf16 and fp16 weights, every
// activation, K and N of any size, views of any alignment.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn::sm80 {

// Text for KernelRow::configs.
std::vector<std::string> linear_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<LinearKernel> make_linear(const LinearSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
