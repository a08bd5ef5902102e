// SPDX-License-Identifier: Apache-2.0
// One token of each sequence, states in place (ScanKernel::update). Enqueues, and throws what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/cuda/scan/scan_params.hpp"

namespace ringattn::cuda {

// Loads the kernel onto the current device (load_kernel.hpp).
void load_update(Dtype dtype, bool state_decays, int state_dim);
void update_states(const UpdateParams& params, Dtype dtype, bool state_decays, cudaStream_t stream);

}  // namespace ringattn::cuda
