// SPDX-License-Identifier: Apache-2.0
// A BatchedGemmKernel on a GPU: everything except the device code.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/gemm/cuda/gemm_params.hpp"

namespace ringattn::cuda {

// Returns what this backend's GEMM kernels lack for `spec` (KernelRow::missing).
std::vector<std::string> gemm_missing(const BatchedGemmSpec& spec);

// `backend` is a CudaBackend and outlives the kernel. Nothing is allocated. Tasks may run in any stream and in a graph.
std::unique_ptr<BatchedGemmKernel> make_cuda_gemm(const BatchedGemmSpec& spec, const GemmLauncher& launcher,
                                                  Backend& backend);

}  // namespace ringattn::cuda
