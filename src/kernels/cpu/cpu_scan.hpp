// SPDX-License-Identifier: Apache-2.0
// The CPU scans: `cpu_scan` has one decay a head (Mamba-2), `cpu_selective` one for each state of each channel
// (Mamba-1). What they can do, and how to make one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/scan.hpp"

namespace ringattn::cpu {

// What `spec` requires that the kernel lacks; see KernelRow::missing.
std::vector<std::string> cpu_scan_missing(const ScanSpec& spec);
std::vector<std::string> cpu_selective_scan_missing(const ScanSpec& spec);

// What the threads of a backend, which make_cpu_backend() made, reach together where nobody has measured.
double cpu_scan_speed(const Backend& backend);
double cpu_selective_scan_speed(const Backend& backend);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<ScanKernel> make_cpu_scan(const ScanSpec& spec, Backend& backend);
std::unique_ptr<ScanKernel> make_cpu_selective_scan(const ScanSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
