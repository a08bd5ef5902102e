// SPDX-License-Identifier: Apache-2.0
// The CPU SSM kernels: `cpu_ssd` has one decay per head (Mamba-2), `cpu_selective_scan` one for each state of each
// channel (Mamba-1).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/host_work.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_ssd_missing(const SsmSpec& spec);
std::vector<std::string> cpu_selective_scan_missing(const SsmSpec& spec);

// The work of a run of so many tokens (KernelRow::host_work).
HostWork cpu_ssd_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens);
HostWork cpu_selective_scan_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<SsmKernel> make_cpu_ssd(const SsmSpec& spec, Backend& backend);
std::unique_ptr<SsmKernel> make_cpu_selective_scan(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
