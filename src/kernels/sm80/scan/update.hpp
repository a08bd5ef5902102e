// SPDX-License-Identifier: Apache-2.0
// One token of each sequence, states in place (ScanKernel::update). Enqueues, and throws what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/sm80/scan/scan_params.hpp"

namespace ringattn::sm80 {

void update_states(const UpdateParams& params, Dtype dtype, bool state_decays, cudaStream_t stream);

}  // namespace ringattn::sm80
