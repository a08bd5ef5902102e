// SPDX-License-Identifier: Apache-2.0
// Decode step of an SSM layer: one token per sequence, states updated in place (SsmKernel::update). Enqueues the launch
// and throws if it fails.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// Loads the kernels onto the current device (load_kernel.hpp). Returns the max. number of resident CTAs of the
// persistent kernel (update_loop.cuh), or 0 if there is none for this spec.
int load_update(Dtype dtype, bool state_decays, int state_dim);
// `resident_ctas`: the return value of load_update().
void update_states(const UpdateParams& params, Dtype dtype, bool state_decays, int resident_ctas, cudaStream_t stream);

}  // namespace ringattn::cuda
