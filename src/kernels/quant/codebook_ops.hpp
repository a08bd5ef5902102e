// SPDX-License-Identifier: Apache-2.0
// Search for the nearest codebook vector, one function table per SIMD target like common/cpu/tile_ops.hpp.
#pragma once

namespace ringattn {

struct CodebookOps {
  // Returns which of the 256 vectors is nearest to `element`, [width], by squared_distance()
  // (kernels/quant/row_quantization.hpp). Ties go to the lower index. `vectors` are stored channel by channel, [width,
  // 256]. All numbers are finite.
  int (*nearest)(const float* element, const float* vectors, int width);
};

// The table of this processor's best target. Results do not depend on the target, because each lane sums one vector.
const CodebookOps& best_codebook_ops();

}  // namespace ringattn
