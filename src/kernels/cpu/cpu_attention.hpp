// SPDX-License-Identifier: Apache-2.0
// The CPU fold kernel, `cpu_attention`: what it can do, and how to make one. Any dtype, mask and head ratio; head dims
// that are multiples of 8 up to 576. Tiles of 128 keys, and a row folds exactly the tiles that it sees.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention.hpp"

namespace ringattn::cpu {

// What `spec` requires that the kernel lacks; see KernelRow::missing.
std::vector<std::string> cpu_attention_missing(const AttentionSpec& spec);

// Throws kUsage for numbers of threads that nobody may ask for, kUnsupported for more than can live: OpenMP would end
// the process.
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

// `backend` is a CpuBackend and outlives the kernel. Throws kMemory when the host has no room for the scratch.
// What the threads of a backend, which make_cpu_backend() made, reach together where nobody has measured.
double cpu_attention_speed(const Backend& backend);
std::unique_ptr<AttentionKernel> make_cpu_attention(const AttentionSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
