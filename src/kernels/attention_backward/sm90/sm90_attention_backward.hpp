// SPDX-License-Identifier: Apache-2.0
// The attention backward kernels for Hopper GPUs (sm_90): TMA, wgmma, and one pair of kernels for dQ and for dK and dV.
#pragma once

#include <memory>

#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn::sm90 {

// See KernelRow::make_kernel. `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<AttentionBackwardKernel> make_attention_backward(const AttentionBackwardSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
