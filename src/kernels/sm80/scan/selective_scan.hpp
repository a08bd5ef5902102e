// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_selective_scan. They enqueue, and throw what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/cuda/scan/ssm_params.hpp"

namespace ringattn::sm80 {

using cuda::SsmParams;

// Loads both onto the current device (load_kernel.hpp).
void load_selective_scan(Dtype dtype);
// Local states of segments, and their sums of dt.
void selective_scan_states(const SsmParams& params, Dtype dtype, cudaStream_t stream);
// Rows of y.
void selective_scan_outputs(const SsmParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::sm80
