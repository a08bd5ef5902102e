// SPDX-License-Identifier: Apache-2.0
// The SSM kernels `sm80_ssd` and `sm80_selective_scan`. `sm80_ssd` has one decay per head (Mamba-2). It uses tensor
// cores within chunks and keeps states in registers; ssd_tiles.cuh says what is rounded. `sm80_selective_scan` has one
// decay per state of each channel (Mamba-1), and goes token by token in fp32.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::sm80 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing. Includes too little shared memory on
// a visible GPU.
std::vector<std::string> ssd_missing(const SsmSpec& spec);
std::vector<std::string> selective_scan_missing(const SsmSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend);
std::unique_ptr<SsmKernel> make_selective_scan(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
