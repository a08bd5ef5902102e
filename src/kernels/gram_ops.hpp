// SPDX-License-Identifier: Apache-2.0
// The sums of gram.hpp, one table of functions per SIMD target, as cpu/tile_ops.hpp has it for the fold.
#pragma once

#include <cstdint>

namespace ringattn {

inline constexpr std::int64_t kGramRows = 4;  // of sums that are added to at a time

struct GramOps {
  // Adds `count` tokens, wide[count, dim], to rows [row, row + kGramRows) of sums[dim, dim], from the diagonal on.
  // `row` is a multiple of kGramRows, dim of 8.
  void (*add)(const double* wide, std::int64_t count, std::int64_t dim, std::int64_t row, double* sums);
};

// Of the best target of this processor. Sums don't depend on it: products are exact, so it doesn't matter whether they
// are added in one operation.
const GramOps& best_gram_ops();

}  // namespace ringattn
