// SPDX-License-Identifier: Apache-2.0
// A HeadProductKernel on a GPU: everything but the arithmetic.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/product_params.hpp"
#include "kernels/head_product.hpp"

namespace ringattn::cuda {

// What `spec` requires that the products of this backend lack; see KernelRow::missing.
std::vector<std::string> product_missing(const HeadProductSpec& spec);

// `backend` is a CudaBackend and outlives the kernel. Nothing is allocated; tasks may be in any stream, and in a graph.
std::unique_ptr<HeadProductKernel> make_cuda_product(const HeadProductSpec& spec, const ProductLauncher& launcher,
                                                     Backend& backend);

}  // namespace ringattn::cuda
