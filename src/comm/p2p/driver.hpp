// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: looks up driver functions at run time, so that nothing links libcuda and the program starts
// without a driver.
#pragma once

#include <cuda_runtime.h>
#include <fmt/format.h>

#include "base/cuda.hpp"
#include "base/error.hpp"

namespace ringattn {

// Throws kUnsupported if the driver has no such function.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    fail(ErrorCode::kUnsupported, fmt::format("the GPU driver has no {}", name), "it is older than CUDA 12",
         {"Update the driver, or use ", setting("transport", "nccl"), "."});
  }
  return reinterpret_cast<Function>(address);
}

}  // namespace ringattn
