// SPDX-License-Identifier: Apache-2.0
// The CPU SSD backward kernel, `cpu_ssd_backward`: every dtype, head_dim and state_dim multiples of 8 up to 256.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/host_work.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_ssd_backward_missing(const SsdBackwardSpec& spec);

// Default speed estimate in flop/s, for all threads of a backend from make_cpu_backend().
double cpu_ssd_backward_speed(const Backend& backend);
// The work of a run of so many tokens (KernelRow::host_work).
HostWork cpu_ssd_backward_work(const SsdBackwardSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<SsdBackwardKernel> make_cpu_ssd_backward(const SsdBackwardSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
