// SPDX-License-Identifier: Apache-2.0
// The linear kernel of Hopper with wgmma: bf16 and fp16 weights, every activation, K and N of any size. Tasks that TMA
// cannot read, because rows are not aligned to 16 bytes, run by mma.sync, with the same bits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn::sm90 {

// Text for KernelRow::configs.
std::vector<std::string> linear_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<LinearKernel> make_linear(const LinearSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
