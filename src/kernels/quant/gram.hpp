// SPDX-License-Identifier: Apache-2.0
// Gram matrices of a tensor's channels, from which low-rank bases are made: rowsᵀ · rows for each head.
//
//   sums[head, i, j] += Σ_t rows[t, head, i] · rows[t, head, j]   for i ≤ j
//
// Each sum is one fp64 chain over the tokens in ascending order, where products of 16-bit numbers are exact. So results
// are bitwise equal on all backends, and a tensor may be added in several calls. A head's diagonal is finite exactly if
// all its elements are.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"

namespace ringattn {

// Memory is of the backend's kind.
struct GramTask {
  TensorView rows;         // [tokens, heads, dim], bf16 or fp16; dim is a multiple of 8
  double* sums = nullptr;  // [heads, dim, dim]; unspecified below the diagonal
};
// Validation of a task, shared by all backends. Throws kInternal.
void check_task(const GramTask& task);

// Host implementation of Backend::add_gram().
void add_gram_on_host(const GramTask& task, int threads);

}  // namespace ringattn
