// SPDX-License-Identifier: Apache-2.0
// The fp64 oracles of SSM layers and the causal conv1d: their definitions, token by token, sharing no code with the
// kernels. Accuracy is measured against them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// One sequence, in rows [row, row + tokens) of the task's tensors in host memory. The task's runs and y are not used.
// `state` is [heads, head_dim, state_dim]: the initial state, or empty for zero, and then the final state. Returns y
// [tokens, heads, head_dim] before the last rounding.
std::vector<double> oracle_ssm(const SsmSpec& spec, const SsmTask& task, std::int64_t row, std::int64_t tokens,
                               std::vector<double>& state);

// One sequence from its beginning, in rows [row, row + tokens) of x [rows, 1, channels], in host memory. Returns y
// [tokens, channels] before the last rounding.
std::vector<double> oracle_conv1d(const CausalConv1dSpec& spec, const TensorView& x, const float* weight,
                                  const float* bias, std::int64_t row, std::int64_t tokens);

// One channel of one sequence of the convolution.
struct Conv1dChannel {
  std::vector<double> tokens;  // [width − 1 + tokens], the initial halo first
  std::vector<double> dy;      // [tokens]
  std::vector<double> dfinal;  // [width − 1], the gradient of the final halo; empty: zeros
  std::vector<double> taps;    // [width]
  double bias = 0.0;
};

// Its gradients, and for each the sum of its terms' magnitudes.
struct Conv1dChannelGradients {
  std::vector<double> dtokens, dtokens_size;  // [width − 1 + tokens]
  std::vector<double> dtaps, dtaps_size;      // [width + 1], the bias last
};

Conv1dChannelGradients oracle_conv1d_gradients(const CausalConv1dSpec& spec, const Conv1dChannel& channel);

}  // namespace ringattn
