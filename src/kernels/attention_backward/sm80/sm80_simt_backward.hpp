// SPDX-License-Identifier: Apache-2.0
// The registry entry `sm80_simt_backward`: gradients in fp32 arithmetic without tensor cores, for what sm80_simt
// computes. fp32, bf16, fp16; head dims that are multiples of 8 up to 512, equal or not; all masks, soft-cap and sinks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn::sm80 {

// See KernelRow::missing.
std::vector<std::string> simt_backward_missing(const AttentionBackwardSpec& spec);

// See KernelRow::make_kernel. `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<AttentionBackwardKernel> make_simt_backward(const AttentionBackwardSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
