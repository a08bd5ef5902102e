// SPDX-License-Identifier: Apache-2.0
// The search of a codebook's nearest vector, one table of functions per SIMD target, as cpu/tile_ops.hpp has it for the
// fold.
#pragma once

namespace ringattn {

struct CodebookOps {
  // Which of the 256 vectors is nearest to `element`, [width], by squared_distance() (kernels/row_quantization.hpp): of
  // several the first. `vectors` lie channel by channel, [width, 256]. Numbers are finite.
  int (*nearest)(const float* element, const float* vectors, int width);
};

// Of the best target of this processor. The answer doesn't depend on it: a lane holds one vector's sum.
const CodebookOps& best_codebook_ops();

}  // namespace ringattn
