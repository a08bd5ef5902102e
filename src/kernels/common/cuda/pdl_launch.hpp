// SPDX-License-Identifier: Apache-2.0
// Host side of programmatic dependent launch (PDL, see pdl.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "base/cuda.hpp"
#include "base/memory.hpp"

namespace ringattn::cuda {

// A launch whose CTAs may start before the previous kernel in the stream is done. The kernel must call pdl_wait().
struct PdlLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2]{};

  PdlLaunch(int ctas, int threads, int shared_bytes, Stream stream) {
    config.gridDim = static_cast<unsigned>(ctas);
    config.blockDim = static_cast<unsigned>(threads);
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = cuda_stream(stream);
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 1;
  }
  // Disables PDL if the kernel's code was compiled for GPUs older than sm_90, where pdl_wait() does nothing.
  void serialize_unless_pdl(const void* kernel) {
    cudaFuncAttributes code{};
    check_cuda(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes");
    if (code.ptxVersion < 90) config.numAttrs = 0;
  }
  void set_cluster_size(int ctas) {
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
    config.numAttrs = 2;
  }
  PdlLaunch(const PdlLaunch&) = delete;
  PdlLaunch& operator=(const PdlLaunch&) = delete;
};

}  // namespace ringattn::cuda
