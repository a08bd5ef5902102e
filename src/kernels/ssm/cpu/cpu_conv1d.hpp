// SPDX-License-Identifier: Apache-2.0
// The CPU conv1d kernel, `cpu_conv1d`: threads process blocks of rows of the runs. Supports channels that are multiples
// of 8.
#pragma once

#include <memory>

#include "kernels/ssm/causal_conv1d.hpp"

namespace ringattn::cpu {

// Default speed estimate in flop/s, for all threads of a backend from make_cpu_backend().
double cpu_conv1d_speed(const Backend& backend);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<CausalConv1dKernel> make_cpu_conv1d(const CausalConv1dSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
