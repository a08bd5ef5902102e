// SPDX-License-Identifier: Apache-2.0
// The ordered passes over states (kernels/ssm.hpp, 2 and 3), each element of a state by itself. They enqueue, and
// throw what a launch fails with.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/scan/ssm_params.hpp"

namespace ringattn::cuda {

// Loads both onto the current device (load_kernel.hpp).
void load_state_passing(bool state_decays);

// Of every super-segment of the launch that has several segments: local states of its segments become those in front of
// them, its own local state comes to SsmParams::super_states, and the logarithms go along.
void pass_segments(const SsmParams& params, bool state_decays, cudaStream_t stream);

// Of every run of the launch: local states of its super-segments become the states in front of them, from the run's
// initial state to its final one.
void pass_super_segments(const SsmParams& params, bool state_decays, cudaStream_t stream);

}  // namespace ringattn::cuda
