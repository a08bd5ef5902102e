// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of the gradients of SSD, checked against fp64:
//
//   |g − g64| ≤ 2^−p · |g64| + r · m,   m = Σ |terms of g64|
//
// p: the bits of the gradient's significand; r: ssd_gradient_term(), what fp32 may lose of a term, and more for a
// kernel that rounds factors of products to 16 bits. g64 and m are those of oracle_ssd_backward(). For a gradient of a
// parameter r is divided by the root of the number of chunks.
//
// A gradient depends on its whole sequence, so whole heads of all sequences are computed in fp64. All heads of small
// jobs are checked. Of others two heads are, and then dB and dC, sums over heads, are not.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/collective.hpp"
#include "ops/common/gradient_accuracy.hpp"
#include "ops/ssd_backward/loaded_ssd_backward.hpp"

namespace ringattn {

struct SsdBackwardAccuracy {
  std::int64_t rows = 0;  // token heads
  bool all_heads = false;
  std::vector<GradientAccuracy> gradients;  // in the order of the output

  bool passes() const { return pass(gradients); }
};

// Collective; all ranks get the same answer. `result` is this rank's.
SsdBackwardAccuracy check_ssd_gradients(const Collective& collective, const SsdBackwardInput& input,
                                        const SsdBackwardRankResult& result, bool rounds_factors, int threads);

}  // namespace ringattn
