// SPDX-License-Identifier: Apache-2.0
// The GPU scans. `sm80_ssd` has one decay a head (Mamba-2): products of chunks on tensor cores, states in registers;
// what is rounded there says ssd_tiles.cuh. `sm80_selective_scan` has one for each state of each channel (Mamba-1), and
// goes token by token in fp32. What they can do, and how to make one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/ssm.hpp"

namespace ringattn::sm80 {

// What `spec` requires that the kernel lacks; see KernelRow::missing. A GPU here may lack shared memory for it.
std::vector<std::string> ssd_missing(const SsmSpec& spec);
std::vector<std::string> selective_scan_missing(const SsmSpec& spec);

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend);
std::unique_ptr<SsmKernel> make_selective_scan(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
