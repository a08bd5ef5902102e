// SPDX-License-Identifier: Apache-2.0
// CUDA loads a kernel's code at its first use. Loading may wait for all work on the device, including a kernel that
// waits for a peer which waits for this rank. Therefore kernels are loaded when their owner is made.
#pragma once

#include "base/cuda.hpp"

namespace ringattn::cuda {

template <class Kernel>
void load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

}  // namespace ringattn::cuda
