// SPDX-License-Identifier: Apache-2.0
// The accuracy that is promised, and its check against the fp64 oracle: the greatest error of O is at most twice that
// of a same-precision computation, which rounds S and P to the input dtype and accumulates in fp32, plus 1e-6.
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

// Checks a result, out [tokens, heads, head_dim_v] of spec.dtype and lse [tokens, heads]. NaN, ∞ and −∞ must stand
// exactly where the oracle has them, with one exception: where rows share tiles (those of the kernel, `tiles`), a value
// that is not finite makes its column not finite in every row that uses its tile. Empty if all is well, else what is
// wrong first. Counts as a check where there are rows. `slack` is allowed in addition to what is promised.
[[nodiscard]] std::string check_accuracy(const AttentionInputs& inputs, const std::vector<std::byte>& out,
                                         const std::vector<float>& lse, const TileSizes& tiles = {},
                                         double slack = 0.0);

// The slack where a few scores tower over all others. Their weights are 1 in the same-precision computation, which
// makes no error then; a kernel whose softmax_offset is not the maximum rounds them as any other weight. 0 for fp32.
double slack_of_towering_scores(Dtype dtype);

// Checks a result whose weights are finite by what their rounding can do to it, and not by the same-precision
// computation, which rounds scores, and so says little where they are large: O within the rounding of weights and of O
// itself, and `score_error`, what the scores' own size leaves to a weight in fp32; each relative to Σ w |v|. LSE as
// check_accuracy() has it for 16-bit input.
[[nodiscard]] std::string check_weights(const AttentionInputs& inputs, const std::vector<std::byte>& out,
                                        const std::vector<float>& lse, double score_error);

}  // namespace ringattn::testing
