// SPDX-License-Identifier: Apache-2.0
// The rate of a plain GEMM on this machine's CPU, to compare attention kernels with. The BLAS library is opened only on
// request, because nothing else in the program needs one.
#pragma once

#include <string>

namespace ringattn {

struct SgemmRate {
  double flops_per_second = 0.0;
  std::string library;  // e.g. "libopenblas.so.0"
};

// Median rate of SGEMM 2048³ with `threads` threads. Throws kUnsupported if no BLAS is installed.
SgemmRate measure_sgemm(int threads);

}  // namespace ringattn
