// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_selective_scan, launched by sm80_ssd.cpp. Functions enqueue and throw if a launch fails.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::sm80 {

using cuda::SsmParams;

// Loads both kernels onto the current device (load_kernel.hpp).
void load_selective_scan(Dtype dtype);
// Computes local states of segments, and their sums of dt.
void selective_scan_states(const SsmParams& params, Dtype dtype, cudaStream_t stream);
// Computes y.
void selective_scan_outputs(const SsmParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::sm80
