// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_selective. They enqueue, and throw what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/cuda/scan/scan_params.hpp"

namespace ringattn::sm80 {

using cuda::ScanParams;

// Loads both onto the current device (load_kernel.hpp).
void load_selective(Dtype dtype);
// Local states of segments, and their sums of dt.
void selective_fold(const ScanParams& params, Dtype dtype, cudaStream_t stream);
// Rows of y.
void selective_finish(const ScanParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::sm80
