// SPDX-License-Identifier: Apache-2.0
// Events functions of plain headers that kernels call as well.
#pragma once

#if defined(__CUDACC__)
#define RINGATTN_HOST_DEVICE __host__ __device__
// In front of a template that calls what it is given, which may exist on one side only.
#define RINGATTN_ANY_CALLEE _Pragma("nv_exec_check_disable")
#else
#define RINGATTN_HOST_DEVICE
#define RINGATTN_ANY_CALLEE
#endif
