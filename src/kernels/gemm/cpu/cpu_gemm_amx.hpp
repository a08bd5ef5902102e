// SPDX-License-Identifier: Apache-2.0
// The kernel `cpu_gemm_amx`: batched GEMM of bf16 by AMX tiles. Its order of sums is that of amx_gemm-inl.hpp, so its
// bits are not those of `cpu_gemm`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn::cpu {

// What `spec` requires and the kernel does not support (KernelRow::missing).
std::vector<std::string> cpu_gemm_amx_missing(const BatchedGemmSpec& spec);

// Why the kernel cannot run on this machine. Empty: it can.
std::string amx_gemm_unavailable();

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<BatchedGemmKernel> make_cpu_gemm_amx(const BatchedGemmSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
