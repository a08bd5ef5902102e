// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of the gradients of the causal convolution, checked against fp64:
//
//   |g − g64| ≤ 2^−p · |g64| + r · m + 2^−126,   m = Σ |terms of g64|
//
// p: the bits of the gradient's significand; r: 2^−18.9 for rows and 2^−18.3 for dweight and dbias, whose sums are
// longer. g64 and m are those of oracle_conv1d_gradients().
//
// The gradient of a weight is a sum over all tokens, so whole channels of all sequences are computed in fp64: all
// channels of small jobs; otherwise as many as have 2^22 elements, evenly spread.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/collective.hpp"
#include "ops/common/gradient_accuracy.hpp"
#include "ops/conv1d_backward/loaded_conv1d_backward.hpp"

namespace ringattn {

struct Conv1dBackwardAccuracy {
  std::int64_t rows = 0;      // elements of dx
  std::int64_t channels = 0;  // of each token
  std::vector<GradientAccuracy> gradients;
};

// Collective; all ranks get the same result. `result`: this rank's gradients.
Conv1dBackwardAccuracy check_conv1d_gradients(const Collective& collective, const Conv1dBackwardInput& input,
                                              const Conv1dBackwardRankResult& result, int threads);

}  // namespace ringattn
