// SPDX-License-Identifier: Apache-2.0
// The promised accuracy, and its check against the fp64 oracle: the greatest error of O is at most twice the error of a
// same-precision reference, which rounds S and P to the input dtype and accumulates in fp32, plus 1e-6.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

inline constexpr double kOutputSlack = 1e-6;      // absolute, in addition to twice the same-precision error
inline constexpr double kLseRelativeFp32 = 1e-5;  // relative to max(1, |lse|)
inline constexpr double kLseAbsoluteSixteenBit = 1e-3;
// Relative: the fp32 score itself, a sum of head_dim rounded products, is no finer than this.
inline constexpr double kLseUlps = 8.0 * 0x1p-23;

// O and LSE of a computation, as numbers: out [tokens, heads, head_dim_v], lse [tokens, heads].
struct Numbers {
  std::vector<double> out;
  std::vector<double> lse;
};

// By the fp64 oracle.
Numbers oracle_numbers(const AttentionInputs& inputs);

// By the same-precision computation; out is rounded to the dtype at the end.
Numbers same_precision_reference(const AttentionInputs& inputs);

// Checks a result, out [tokens, heads, head_dim_v] of spec.dtype and lse [tokens, heads]. NaN, ∞ and −∞ must be exactly
// where the oracle has them, with one exception: if rows share tiles (the kernel's `tiles`), a non-finite value makes
// its column non-finite in every row that uses its tile. Returns an empty string, or a description of the first error.
// Counts as a check if there are rows. `slack` is allowed in addition to the promised error.
[[nodiscard]] std::string check_accuracy(const AttentionInputs& inputs, const std::vector<std::byte>& out,
                                         const std::vector<float>& lse, const TileSizes& tiles = {},
                                         double slack = 0.0);

// The slack for inputs in which a few scores are far above all others. Their weights are 1 in the same-precision
// reference, which then has no error. A kernel whose softmax_offset is not the maximum rounds them like any other
// weight. 0 for fp32.
double slack_of_towering_scores(Dtype dtype);

// Checks a result with finite weights against a bound on rounding errors instead of the same-precision reference, which
// rounds scores and so has large errors if they are large. Allowed for O, relative to Σ w |v|, are the rounding of
// weights and of O itself, and `score_error`, the error of a weight that the size of the scores causes in fp32. LSE is
// checked as in check_accuracy() for 16-bit input.
[[nodiscard]] std::string check_weights(const AttentionInputs& inputs, const std::vector<std::byte>& out,
                                        const std::vector<float>& lse, double score_error);

}  // namespace ringattn::testing
