// SPDX-License-Identifier: Apache-2.0
// Forces the next loop to be unrolled, so that its accumulators stay in registers.
#pragma once

#if defined(__clang__)
#define RINGATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define RINGATTN_UNROLL _Pragma("GCC unroll 16")
#endif
