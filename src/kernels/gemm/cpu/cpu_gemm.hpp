// SPDX-License-Identifier: Apache-2.0
// The CPU batched GEMM kernel, `cpu_gemm`. Supports every dtype, and dims that are multiples of 8.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_gemm_missing(const BatchedGemmSpec& spec);

// Estimated flop/s: attention by vectors and GEMM are both chains of multiply-adds.
double cpu_gemm_speed(const Backend& backend);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<BatchedGemmKernel> make_cpu_gemm(const BatchedGemmSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
