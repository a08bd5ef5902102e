// SPDX-License-Identifier: Apache-2.0
// The kernel `cpu_gated_delta_amx`: the gated delta rule of bf16 by AMX tiles (amx_delta-inl.hpp). It rounds factors as
// sm90_gated_delta does, so its bits are not those of `cpu_gated_delta`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/host_work.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_gated_delta_amx_missing(const GatedDeltaSpec& spec);

// Why the kernel cannot run on this machine. Empty: it can.
std::string amx_gated_delta_unavailable();

// Default speed estimate in flop/s, for all threads of a backend from make_cpu_backend().
double cpu_gated_delta_amx_speed(const Backend& backend);
// The work of a run of so many tokens (KernelRow::host_work).
HostWork cpu_gated_delta_amx_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<GatedDeltaKernel> make_cpu_gated_delta_amx(const GatedDeltaSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
