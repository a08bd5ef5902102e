// SPDX-License-Identifier: Apache-2.0
// The accuracy that is promised of gradients, and its check against the fp64 oracle. In each sequence the greatest
// error of a gradient is at most
//   2 × that of the same-precision reference + 2 · max |(g + 0.3 − 0.3) − g| + 2⁻²⁰ · softmax_scale · ‖dO‖ ‖V‖ ‖K‖.
// The second term is computed in the gradient's dtype. The third one, of the largest rows, is for dQ, where the exact
// value may be 0; dK has ‖Q‖ in place of ‖K‖, and dV has none.
#pragma once

#include <string>

#include "tests/support/backward_runner.hpp"

namespace ringattn::testing {

// The forward's results that the oracle uses: those of the inputs, as kernels do, or its own.
enum class ForwardResults { kGiven, kExact };

// Checks the row stats, all gradients and the sinks' terms. Values that are not finite must stand where the oracle has
// them. Empty if all is well, else what is wrong first. Counts as a check where there are rows.
[[nodiscard]] std::string check_gradients(const BackwardInputs& inputs, const BackwardResult& result,
                                          ForwardResults forward = ForwardResults::kGiven);

}  // namespace ringattn::testing
