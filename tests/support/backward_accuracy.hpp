// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of gradients, and its check against the fp64 oracle. In each sequence the greatest error of a
// gradient is at most
//   2 × that of the same-precision reference + 2 · max |(g + 0.3 − 0.3) − g| + 2⁻²⁰ · softmax_scale · ‖dO‖ ‖V‖ ‖K‖.
// The second term is computed in the gradient's dtype. The third one, of the largest rows, is for dQ, where the exact
// value may be 0; dK has ‖Q‖ in place of ‖K‖. For dV it is 2⁻²⁰ · softmax_scale · ‖dO‖ ‖Q‖ ‖K‖: the error of a score in
// fp32 is a relative error of P.
#pragma once

#include <string>

#include "tests/support/backward_runner.hpp"

namespace ringattn::testing {

// The forward results that the oracle uses: the inputs' O and LSE, as kernels do, or its own.
enum class ForwardResults { kGiven, kExact };

// Checks the row stats, all gradients and the sinks' terms. Non-finite values must be where the oracle has them.
// Returns an empty string, or a description of the first error. Counts as a check if there are rows.
[[nodiscard]] std::string check_gradients(const BackwardInputs& inputs, const BackwardResult& result,
                                          ForwardResults forward = ForwardResults::kGiven);

}  // namespace ringattn::testing
