// SPDX-License-Identifier: Apache-2.0
// AMX: the tile unit of x86 processors from Sapphire Rapids on, which multiplies 16 x 32 by 32 x 16 bf16 matrices, and
// 16 x 64 by 64 x 16 int8 matrices.
// Linux saves tiles for a process only after it has asked for permission.
#pragma once

#include <string>

namespace ringattn::cpu {

// Whether this process may use AMX tiles of bf16, AVX512-BF16 and AVX512-VBMI. The first call asks for permission,
// which holds for all threads.
bool processor_has_amx_bf16();

// Whether kernels use AMX tiles of bf16: the processor has them, and the SIMD target (kernels/common/simd_target.hpp)
// includes them.
bool has_amx_bf16();

// Why they do not: the SIMD target that a user set, or the machine.
std::string amx_unavailable();

// Whether kernels also use AMX tiles of int8.
bool has_amx_int8();

}  // namespace ringattn::cpu
