// SPDX-License-Identifier: Apache-2.0
// `cpu_conv1d`: threads over pieces of the runs. Channels that are multiples of 8.
#pragma once

#include <memory>

#include "kernels/causal_conv1d.hpp"

namespace ringattn::cpu {

// What the threads of a backend, which make_cpu_backend() made, reach together where nobody has measured.
double cpu_conv1d_speed(const Backend& backend);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<CausalConv1dKernel> make_cpu_conv1d(const CausalConv1dSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
