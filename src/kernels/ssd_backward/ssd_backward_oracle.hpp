// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of the gradients of SSD: reverse-mode differentiation of the plain recurrence, token by token,
// sharing no code with the kernels. Decays are not clamped.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn {

// Dense gradients of one sequence, before the last rounding.
struct SsdGradients {
  std::vector<double> dx;                // [tokens, heads, head_dim]
  std::vector<double> ddt;               // [tokens, heads]
  std::vector<double> db;                // [tokens, groups, state_dim]
  std::vector<double> dc;                // [tokens, groups, state_dim]
  std::vector<double> dz;                // as dx; empty without a gate
  std::vector<double> da;                // [heads]
  std::vector<double> dd;                // [heads]; empty without D
  std::vector<double> ddt_bias;          // [heads]; empty without a dt bias
  std::vector<double> initial_gradient;  // [heads, head_dim, state_dim]
};

enum class OracleTerms {
  kSigned,
  kMagnitudes,  // every factor but decays is replaced by its absolute value: what a rounding error is a part of
};

// One sequence, in rows [row, row + tokens) of the task's tensors in host memory. Of the task only x, dt, b, c, z, dy,
// a, d and dt_bias are used. `initial` and `final_gradient` are [heads, head_dim, state_dim], or empty for zero.
SsdGradients oracle_ssd_backward(const SsmSpec& spec, const SsdBackwardTask& task, std::int64_t row,
                                 std::int64_t tokens, std::span<const float> initial,
                                 std::span<const float> final_gradient, OracleTerms terms = OracleTerms::kSigned);

}  // namespace ringattn
