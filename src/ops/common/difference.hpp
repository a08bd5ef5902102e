// SPDX-License-Identifier: Apache-2.0
// Bitwise comparison of results, and a description of the first difference.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "attention/tokens/job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "base/tensor.hpp"
#include "comm/collective.hpp"

namespace ringattn {

// One element in which two results differ. Trivially copyable, because ranks exchange it.
struct Difference {
  bool in_lse = false;     // in lse, not out; for an SSM op: in the final states, not y
  std::int64_t token = 0;  // packed token; for final states: the sequence
  std::int64_t head = 0;
  std::int64_t dim = 0;  // 0 in lse
  Dtype dtype = Dtype::kF32;
  std::uint32_t left_bits = 0;
  std::uint32_t right_bits = 0;
};

// The number of representable values between `left` and `right`; −0 and +0 are neighbours. −1 if one of them is NaN.
std::int64_t ulp_distance(std::uint32_t left, std::uint32_t right, Dtype dtype);

// "out at sequence 0, token 17, head 3, dim 5: 0.5 (0x3f00) against 0.503906 (0x3f01), 1 ulp apart"
std::string describe(const Difference& difference, const Job& job);
// The same for another tensor. `cu`: packed token at which each sequence begins, then the number of tokens.
std::string describe(const Difference& difference, std::span<const std::int64_t> cu, std::string_view tensor = "out");
// The same for a tensor without an axis of heads: "y at sequence 0, token 17, feature 5: …".
std::string describe_feature(const Difference& difference, std::span<const std::int64_t> cu, std::string_view tensor);
// The same for an SSM layer, whose tensors are y and final_states, [sequences, heads, head_dim · state_dim]. For only a
// convolution it is final_conv_state, [sequences, channels, width − 1].
std::string describe(const Difference& difference, const SsmJob& job);

// The first element, in order of rows, heads and dims, whose bits differ. Both tensors are [total_tokens(runs), heads,
// dim] of the same dtype, with the rows of `runs`.
std::optional<Difference> first_difference(bool in_lse, const TensorView& left, const TensorView& right,
                                           std::span<const PackedRun> runs);

// The difference of the lowest token of any rank (out before lse). Collective; every rank gets it.
std::optional<Difference> earliest(const Collective& collective, const std::optional<Difference>& mine);

}  // namespace ringattn
