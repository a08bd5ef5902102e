// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ringattn::cpu {

// Why kernels use no AMX tiles of bf16: the SIMD target that a user set, or the machine.
std::string amx_unavailable();

}  // namespace ringattn::cpu
