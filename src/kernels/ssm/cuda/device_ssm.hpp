// SPDX-License-Identifier: Apache-2.0
// SsmKernel on a GPU, without the arithmetic within a segment. Distributes runs over launches of kSsmRunsPerLaunch.
// States of segments and super-segments are in the kernel's scratch memory. Used by sm80 and sm90 SSM kernels.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "kernels/common/backend.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// The kernels of one algorithm. accumulate_states() computes local states and log decays of segments, finish() computes
// y.
class SegmentKernels {
 public:
  virtual ~SegmentKernels() = default;

  // Loads the kernels onto the current device (load_kernel.hpp).
  virtual void load() const = 0;
  // Floats of SsmParams::da_cumsum per segment and head.
  virtual std::size_t da_cumsum_floats() const = 0;
  virtual void accumulate_states(const SsmParams& params, cudaStream_t stream) const = 0;
  virtual void finish(const SsmParams& params, cudaStream_t stream) const = 0;
};

// `backend` must be a CudaBackend and must outlive the kernel. Nothing is allocated after reserve(), and no call waits.
std::unique_ptr<SsmKernel> make_device_ssm(const SsmSpec& spec, std::unique_ptr<SegmentKernels> kernels,
                                           Backend& backend);

}  // namespace ringattn::cuda
