// SPDX-License-Identifier: Apache-2.0
// A LinearKernel of floating-point weights on a GPU: everything except the device code.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/cuda/linear_gemm.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn::cuda {

// What this backend's kernels of floating-point weights lack for `spec` (KernelRow::missing): those with tensor cores,
// and sm80_linear_simt.
std::vector<std::string> float_linear_missing(const LinearSpec& spec);
std::vector<std::string> simt_linear_missing(const LinearSpec& spec);

// `backend` is a CudaBackend and outlives the kernel. Tasks may run in any stream, one at a time, and in a graph.
std::unique_ptr<LinearKernel> make_cuda_linear(const LinearSpec& spec, const LinearLauncher& launcher,
                                               Backend& backend);

}  // namespace ringattn::cuda
