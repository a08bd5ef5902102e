// SPDX-License-Identifier: Apache-2.0
// The scan, and the convolution in front of it, by their definitions: fp64, one token after the other, sharing no code
// with the kernels. What accuracy is measured against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/causal_conv1d.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

// One sequence, in rows [row, row + tokens) of the task's tensors, which lie in host memory; the task's runs and y are
// not read. `state` is [heads, head_dim, state_dim]: the initial state, or empty for zero; then the final one.
// Returns y [tokens, heads, head_dim] without the last rounding.
std::vector<double> oracle_ssm(const SsmSpec& spec, const SsmTask& task, std::int64_t row, std::int64_t tokens,
                               std::vector<double>& state);

// One sequence from its beginning, in rows [row, row + tokens) of x [rows, 1, channels], in host memory. Returns
// y [tokens, channels] without the last rounding.
std::vector<double> oracle_conv1d(const CausalConv1dSpec& spec, const TensorView& x, const float* weight,
                                  const float* bias, std::int64_t row, std::int64_t tokens);

}  // namespace ringattn
