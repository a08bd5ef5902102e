// SPDX-License-Identifier: Apache-2.0
// The kernel `sm90_ssd_backward`: gradients of SSD with wgmma and TMA, for H100 and H200. bf16, head_dim 64, state_dim
// 64 and 128. Views may have any alignment. ssd_rows.cuh says what is rounded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn::sm90 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing.
std::vector<std::string> ssd_backward_missing(const SsdBackwardSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel. Nothing is allocated after reserve(), and no call waits.
std::unique_ptr<SsdBackwardKernel> make_ssd_backward(const SsdBackwardSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
