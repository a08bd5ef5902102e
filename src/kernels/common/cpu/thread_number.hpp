// SPDX-License-Identifier: Apache-2.0
// The number of the calling thread in its parallel region.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace ringattn::cpu {

inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

}  // namespace ringattn::cpu
