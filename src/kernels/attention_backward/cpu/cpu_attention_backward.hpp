// SPDX-License-Identifier: Apache-2.0
// The CPU attention backward kernels, `cpu_attention_backward`. They support every dtype, mask and head ratio, and head
// dims that are multiples of 8 up to 576. A row processes exactly the tiles that it sees.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/host_work.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernels do not support (KernelRow::missing).
std::vector<std::string> cpu_attention_backward_missing(const AttentionBackwardSpec& spec);

// Default speed estimate in flop/s, counted as seven matmuls (both passes make the scores), for all threads of a
// backend from make_cpu_backend().
double cpu_attention_backward_speed(const Backend& backend);
// The work of the gradients of causal attention of so many queries to as many keys (KernelRow::host_work).
HostWork cpu_attention_backward_work(const AttentionBackwardSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<AttentionBackwardKernel> make_cpu_attention_backward(const AttentionBackwardSpec& spec,
                                                                     Backend& backend);

}  // namespace ringattn::cpu
