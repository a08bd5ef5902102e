// SPDX-License-Identifier: Apache-2.0
// A kernel's code comes to the device when it is first used, which may wait for everything that runs there: for a peer,
// too, that waits for this rank. So kernels are loaded when their owner is made.
#pragma once

#include "base/cuda.hpp"

namespace ringattn::cuda {

template <class Kernel>
void load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

}  // namespace ringattn::cuda
