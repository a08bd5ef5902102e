// SPDX-License-Identifier: Apache-2.0
// Which tile of its sequence the n-th of a walk is: walks go through a sequence's key runs as if they were one.
#pragma once

#include "kernels/cuda/fold_params.hpp"

namespace ringattn::sm90 {

// Of `count` runs, the one that holds the tile of this number, counted through the sequence's runs.
__device__ __forceinline__ const cuda::RunEntry& find_run(const cuda::RunEntry* runs, int count, std::int64_t number) {
  while (count > 1) {
    const int half = count / 2;
    const bool behind = runs[half].first <= number;
    runs += behind ? half : 0;
    count = behind ? count - half : half;
  }
  return *runs;
}

}  // namespace ringattn::sm90
