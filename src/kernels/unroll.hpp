// SPDX-License-Identifier: Apache-2.0
// Has the loop behind it unrolled, whatever the compiler thinks of it: sums live in registers only then.
#pragma once

#if defined(__clang__)
#define RINGATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define RINGATTN_UNROLL _Pragma("GCC unroll 16")
#endif
