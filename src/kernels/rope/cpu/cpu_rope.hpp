// SPDX-License-Identifier: Apache-2.0
// The CPU RoPE kernel, `cpu_rope`: every spec. Each thread takes tokens, computes their cosines and sines once, and
// rotates all heads.
#pragma once

#include <memory>

#include "kernels/rope/rope.hpp"

namespace ringattn::cpu {

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<RopeKernel> make_cpu_rope(const RopeSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
