// SPDX-License-Identifier: Apache-2.0
// Search for the nearest codebook vector, and the sums of quant/gram.hpp. Each has one function table per SIMD target
// like common/cpu/tile_ops.hpp.
#pragma once

#include <cstdint>

namespace ringattn {

struct CodebookOps {
  // Returns which of the 256 vectors is nearest to `element`, [width], by squared_distance()
  // (kernels/quant/row_quantization.hpp). Ties go to the lower index. `vectors` are stored channel by channel, [width,
  // 256]. All numbers are finite.
  int (*nearest)(const float* element, const float* vectors, int width);
};

// The table of this processor's best target. Results do not depend on the target, because each lane sums one vector.
const CodebookOps& best_codebook_ops();

inline constexpr std::int64_t kGramRows = 4;  // rows of the Gram matrix per call

struct GramOps {
  // Adds `count` tokens, wide[count, dim], to rows [row, row + kGramRows) of sums[dim, dim], from the diagonal on.
  // `row` is a multiple of kGramRows, dim of 8.
  void (*add)(const double* wide, std::int64_t count, std::int64_t dim, std::int64_t row, double* sums);
};

// The table of this processor's best target. Sums do not depend on the target: products are exact, so FMA does not
// change them.
const GramOps& best_gram_ops();

}  // namespace ringattn
