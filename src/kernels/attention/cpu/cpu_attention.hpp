// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernel, `cpu_attention`. Supports every dtype, mask and head ratio, and head dims that are
// multiples of 8 up to 576. Key tiles have 128 keys, and a row processes exactly the tiles that it sees.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/common/host_work.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_attention_missing(const AttentionSpec& spec);

// Default speed estimate in flop/s, for all threads of a backend from make_cpu_backend(): for bf16 with 128 dims.
double cpu_attention_speed(const Backend& backend);
// The work of causal attention of so many queries to as many keys (KernelRow::host_work).
HostWork cpu_attention_work(const AttentionSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` is a CpuBackend and outlives the kernel. Throws kMemory if the host has too little memory for the scratch.
std::unique_ptr<AttentionKernel> make_cpu_attention(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
