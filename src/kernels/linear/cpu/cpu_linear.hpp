// SPDX-License-Identifier: Apache-2.0
// The CPU linear kernel, `cpu_linear`: every dtype, activation and format of weights, any number of features.
#pragma once

#include <memory>

#include "kernels/linear/linear.hpp"

namespace ringattn::cpu {

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<LinearKernel> make_cpu_linear(const LinearSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
