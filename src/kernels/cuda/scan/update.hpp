// SPDX-License-Identifier: Apache-2.0
// One token of each sequence, states in place (SsmKernel::update). Enqueues, and throws what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "base/dtype.hpp"
#include "kernels/cuda/scan/ssm_params.hpp"

namespace ringattn::cuda {

// Loads the kernels onto the current device (load_kernel.hpp). Returns how many CTAs it holds at a time of the one that
// loops over states (update_loop.cuh); 0 where none does.
int load_update(Dtype dtype, bool state_decays, int state_dim);
// `max_walk_ctas`: what load_update() has returned.
void update_states(const UpdateParams& params, Dtype dtype, bool state_decays, int max_walk_ctas, cudaStream_t stream);

}  // namespace ringattn::cuda
