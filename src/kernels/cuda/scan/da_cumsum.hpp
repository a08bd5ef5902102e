// SPDX-License-Identifier: Apache-2.0
// What the scans with one decay a head share beside x, B and C. They enqueue, and throw what a launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/cuda/scan/ssm_params.hpp"

namespace ringattn::cuda {

// Loads compute_da_cumsum() onto the current device (load_kernel.hpp).
void load_da_cumsum(Dtype dtype);
// dt and sums of logarithms of all tokens (SsmParams::da_cumsum), and the logarithms of segments.
void compute_da_cumsum(const SsmParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::cuda
