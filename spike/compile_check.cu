// SPDX-License-Identifier: Apache-2.0
// Instantiates the variants whose registers, spills and SASS regs.sh and sass.sh show.
#include "sm90_fold.cuh"

#define SM80(...)                                                                            \
  template __global__ void ringattn::sm80::fold_kernel<ringattn::sm80::Config<__VA_ARGS__>>( \
      const __grid_constant__ ringattn::sm80::Params);
#define SM90(...)                                                                            \
  template __global__ void ringattn::sm90::fold_kernel<ringattn::sm90::Config<__VA_ARGS__>>( \
      const __grid_constant__ ringattn::sm90::Params);

SM80(128, 64, 4, 2, 2, 2, false, 1)
SM80(64, 128, 4, 2, 2, 2, false, 1)
SM80(256, 64, 8, 1, 2, 1, false, 2)
SM90(2, true, 2)
SM90(2, false, 2, false, false, 3, false)
