// SPDX-License-Identifier: Apache-2.0
// The attention backward kernels for every GPU from sm_80 on: cp.async and mma.sync, one kernel for dQ and one for dK
// and dV.
#pragma once

#include <memory>

#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn::sm80 {

// See KernelRow::make_kernel. `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<AttentionBackwardKernel> make_attention_backward(const AttentionBackwardSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
