// SPDX-License-Identifier: Apache-2.0
// The kernel `cpu_gla`: linear attention with a decay per key dim (gated linear attention), fp32 arithmetic.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/common/host_work.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::cpu {

struct SsmOps;

// result = fma(2^logs[n], before, local) for each row n of states [state_dim, width]. `result` may alias an input.
void join_gla_states(const SsmOps& ops, const float* logs, int state_dim, int width, const float* before,
                     const float* local, float* result);

// Requirements of `spec` that the kernel does not support. See KernelRow::missing.
std::vector<std::string> cpu_gla_missing(const SsmSpec& spec);
HostWork cpu_gla_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens);

// `backend` must be a CpuBackend.
std::unique_ptr<SsmKernel> make_cpu_gla(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
