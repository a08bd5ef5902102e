// SPDX-License-Identifier: Apache-2.0
// The kernel `sm80_ssd_backward`: gradients of SSD in bf16 and fp16, by mma.sync, for every GPU from sm_80 on.
// ssd_states.cuh and ssd_rows.cuh say what is rounded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn::sm80 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing. Includes too little shared memory on
// a visible GPU.
std::vector<std::string> ssd_backward_missing(const SsdBackwardSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel. Nothing is allocated after reserve(), and no call waits.
std::unique_ptr<SsdBackwardKernel> make_ssd_backward(const SsdBackwardSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
