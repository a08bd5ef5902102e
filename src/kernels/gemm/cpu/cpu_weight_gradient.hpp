// SPDX-License-Identifier: Apache-2.0
// The kernel `cpu_weight_gradient`: in a unit, each element is one chain of multiply-adds over the tokens in order.
#pragma once

#include <memory>

#include "kernels/common/backend.hpp"
#include "kernels/gemm/weight_gradient.hpp"

namespace ringattn::cpu {

// `backend` must be a CpuBackend and must outlive the kernel.
std::unique_ptr<WeightGradientKernel> make_cpu_weight_gradient(const WeightGradientSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
