// SPDX-License-Identifier: Apache-2.0
// The CPU scans: `cpu_ssd` has one decay a head (Mamba-2), `cpu_selective_scan` one for each state of each channel
// (Mamba-1). What they can do, and how to make one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/ssm.hpp"

namespace ringattn::cpu {

// What `spec` requires that the kernel lacks; see KernelRow::missing.
std::vector<std::string> cpu_ssd_missing(const SsmSpec& spec);
std::vector<std::string> cpu_selective_scan_missing(const SsmSpec& spec);

// What the threads of a backend, which make_cpu_backend() made, reach together where nobody has measured.
double cpu_ssd_speed(const Backend& backend);
double cpu_selective_scan_speed(const Backend& backend);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<SsmKernel> make_cpu_ssd(const SsmSpec& spec, Backend& backend);
std::unique_ptr<SsmKernel> make_cpu_selective_scan(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
