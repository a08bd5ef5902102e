// SPDX-License-Identifier: Apache-2.0
// A SsmKernel on a GPU: everything but the arithmetic of a segment. Runs go to launches kSsmRunsPerLaunch at a time;
// states of segments and super-segments lie in scratch memory of the kernel.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "kernels/backend.hpp"
#include "kernels/cuda/scan/ssm_params.hpp"

namespace ringattn::cuda {

// What a scan adds. fold() leaves local states and logarithms of segments, finish() the rows of y.
class SegmentKernels {
 public:
  virtual ~SegmentKernels() = default;

  // Loads them onto the current device (load_kernel.hpp).
  virtual void load() const = 0;
  // Floats of SsmParams::da_cumsum that a segment and head takes.
  virtual std::size_t da_cumsum_floats() const = 0;
  virtual void accumulate_states(const SsmParams& params, cudaStream_t stream) const = 0;
  virtual void finish(const SsmParams& params, cudaStream_t stream) const = 0;
};

// `backend` is a CudaBackend and outlives the kernel. Nothing is allocated after reserve(), and no call waits.
std::unique_ptr<SsmKernel> make_device_ssm(const SsmSpec& spec, std::unique_ptr<SegmentKernels> kernels,
                                           Backend& backend);

}  // namespace ringattn::cuda
