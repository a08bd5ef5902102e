// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm80_product`: products of heads with their matrices on tensor cores through mma.sync, Ampere and
// newer. bf16 and fp16, dims that are multiples of 8, views of any alignment, matrices either way round.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/head_product.hpp"

namespace ringattn::sm80 {

// See KernelRow::configs.
std::vector<std::string> product_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<HeadProductKernel> make_product(const HeadProductSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
