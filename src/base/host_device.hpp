// SPDX-License-Identifier: Apache-2.0
// Marks functions of plain headers that kernels call as well.
#pragma once

#if defined(__CUDACC__)
#define RINGATTN_HOST_DEVICE __host__ __device__
// Placed before a template that calls its argument, which may exist only on the host or only on the device.
#define RINGATTN_ANY_CALLEE _Pragma("nv_exec_check_disable")
#else
#define RINGATTN_HOST_DEVICE
#define RINGATTN_ANY_CALLEE
#endif
