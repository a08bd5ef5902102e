// SPDX-License-Identifier: Apache-2.0
// State passing between segments and super-segments (kernels/ssm/ssm.hpp, 2 and 3). Each element of a state is
// independent. Functions enqueue and throw if a launch fails.
#pragma once

#include <cuda_runtime.h>

#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// Loads both kernels onto the current device (load_kernel.hpp).
void load_state_passing(bool state_decays);

// For each super-segment of the launch with more than one segment: replaces the local states of its segments by the
// states before them, writes its own local state to SsmParams::super_states, and accumulates the log decays.
void pass_segments(const SsmParams& params, bool state_decays, cudaStream_t stream);

// For each run of the launch: replaces the local states of its super-segments by the states before them, starting from
// the run's initial state, and writes the final state.
void pass_super_segments(const SsmParams& params, bool state_decays, cudaStream_t stream);

}  // namespace ringattn::cuda
