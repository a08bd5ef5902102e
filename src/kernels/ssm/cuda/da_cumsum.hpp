// SPDX-License-Identifier: Apache-2.0
// dt and dA_cumsum for the SSD kernels of sm80 and sm90. Functions enqueue and throw if a launch fails.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// Loads compute_da_cumsum() onto the current device (load_kernel.hpp).
void load_da_cumsum(Dtype dtype);
// Computes dt and dA_cumsum of all tokens (SsmParams::da_cumsum), and the log decays of segments.
void compute_da_cumsum(const SsmParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::cuda
