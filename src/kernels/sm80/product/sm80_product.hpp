// SPDX-License-Identifier: Apache-2.0
// Two kernel rows of products of heads with their matrices, Ampere and newer: `sm80_product` on tensor cores through
// mma.sync, and `sm80_chain`, whose sums have the order of cpu_product, and so its bits. bf16 and fp16, dims that are
// multiples of 8, views of any alignment, matrices either way round.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/head_product.hpp"

namespace ringattn::sm80 {

// See KernelRow::configs.
std::vector<std::string> product_configs();
std::vector<std::string> chain_configs();

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<HeadProductKernel> make_product(const HeadProductSpec& spec, Backend& backend);
std::unique_ptr<HeadProductKernel> make_chain(const HeadProductSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
