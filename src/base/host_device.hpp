// SPDX-License-Identifier: Apache-2.0
// Marks functions of plain headers that kernels call as well.
#pragma once

#if defined(__CUDACC__)
#define RINGATTN_HOST_DEVICE __host__ __device__
#else
#define RINGATTN_HOST_DEVICE
#endif
