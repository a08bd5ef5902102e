// SPDX-License-Identifier: Apache-2.0
// The kernel `cpu_gla_amx`: linear attention with a decay per key dim, of bf16 by AMX tiles (amx_gla-inl.hpp). It
// rounds factors as sm80_gla does, so its bits are not those of `cpu_gla`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/host_work.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_gla_amx_missing(const SsmSpec& spec);

// Why the kernel cannot run on this machine. Empty: it can.
std::string amx_gla_unavailable();

// The work of a run of so many tokens (KernelRow::host_work).
HostWork cpu_gla_amx_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<SsmKernel> make_cpu_gla_amx(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
