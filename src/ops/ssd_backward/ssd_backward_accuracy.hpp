// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of the gradients of SSD, checked against fp64:
//
//   |g − g64| ≤ 2^−p · |g64| + r · m,   m = Σ |terms of g64|
//
// p: the bits of the gradient's significand. r: ssd_gradient_term(), the allowed fp32 error of a term, and more for a
// kernel that rounds factors of products to 16 bits. g64 and m are those of oracle_ssd_backward(). For the gradient of
// a parameter, r is divided by the square root of the number of chunks.
//
// A gradient depends on its whole sequence, so whole heads of all sequences are computed in fp64. In small jobs all
// heads are checked. In others only two are, and then dB and dC, which are sums over heads, are not checked.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/collective.hpp"
#include "ops/common/gradient_accuracy.hpp"
#include "ops/ssd_backward/loaded_ssd_backward.hpp"

namespace ringattn {

struct SsdBackwardAccuracy {
  std::int64_t rows = 0;  // pairs of token and head
  bool all_heads = false;
  std::vector<GradientAccuracy> gradients;  // in the order of the output

  bool passes() const { return pass(gradients); }
};

// Collective; all ranks get the same result. `result`: this rank's gradients.
SsdBackwardAccuracy check_ssd_gradients(const Collective& collective, const SsdBackwardInput& input,
                                        const SsdBackwardRankResult& result, bool rounds_factors, int threads);

}  // namespace ringattn
