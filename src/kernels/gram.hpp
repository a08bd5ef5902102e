// SPDX-License-Identifier: Apache-2.0
// Products of a tensor's channels with each other, of which bases of low rank are made: for each head rowsᵀ · rows.
//
//   sums[head, i, j] += Σ_t rows[t, head, i] · rows[t, head, j]   for i ≤ j
//
// Each sum is one chain over the tokens in ascending order, in fp64, where products of 16-bit numbers are exact. So
// every backend makes the same bits, and a tensor may come in parts, one behind the other. A head's diagonal is finite
// where all of its numbers are, and only there.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"

namespace ringattn {

// Memory is of the backend's kind.
struct GramTask {
  TensorView rows;         // [tokens, heads, dim] of bf16 or fp16, dim a multiple of 8
  double* sums = nullptr;  // [heads, dim, dim]; what lies below the diagonal is something
};
// What every backend checks of a task. Throws kInternal.
void check_task(const GramTask& task);

// Backend::add_gram() of host memory.
void add_gram_on_host(const GramTask& task, int threads);

}  // namespace ringattn
