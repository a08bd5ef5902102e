// SPDX-License-Identifier: Apache-2.0
// The CPU conv1d kernel, `cpu_conv1d`: threads process blocks of rows of the runs. Supports channels that are multiples
// of 8.
#pragma once

#include <memory>

#include "kernels/common/host_work.hpp"
#include "kernels/ssm/causal_conv1d.hpp"

namespace ringattn::cpu {

// Default speed estimate in flop/s, for all threads of a backend from make_cpu_backend().
double cpu_conv1d_speed(const Backend& backend);
// The work of a run of so many tokens (KernelRow::host_work).
HostWork cpu_conv1d_work(const CausalConv1dSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<CausalConv1dKernel> make_cpu_conv1d(const CausalConv1dSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
