// SPDX-License-Identifier: Apache-2.0
// The rate of a plain matrix product on this machine's CPU, as a yardstick for attention kernels. The BLAS is looked
// for when it is asked for: nothing else of the program needs one.
#pragma once

#include <string>

namespace ringattn {

struct SgemmRate {
  double flops_per_second = 0.0;
  std::string library;  // e.g. "libopenblas.so.0"
};

// Median rate of SGEMM 2048³ with `threads` threads. Throws kUnsupported where no BLAS is installed.
SgemmRate measure_sgemm(int threads);

}  // namespace ringattn
