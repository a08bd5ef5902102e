// SPDX-License-Identifier: Apache-2.0
// The CPU kernel of the gated delta rule: all arithmetic in fp32, in parallel over segments and value heads.
// On x86 subnormals are zero, except in the carry and in updates.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/host_work.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_gated_delta_missing(const GatedDeltaSpec& spec);

// Default speed estimate in flop/s, for all threads of a backend from make_cpu_backend().
double cpu_gated_delta_speed(const Backend& backend);
// The work of a run of so many tokens (KernelRow::host_work).
HostWork cpu_gated_delta_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<GatedDeltaKernel> make_cpu_gated_delta(const GatedDeltaSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
