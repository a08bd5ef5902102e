// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of the gradients of SSD: reverse-mode differentiation of the plain recurrence, token by token,
// sharing no code with the kernels. Decays are not clamped. Also bounds for the difference between a kernel and the
// oracle.
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

// Roundings to 16 bits in a term of a gradient: the maximum number of rounded factors between the inputs and the term.
struct SsdRoundings {
  int bf16 = 0;       // states, scores, and scaled x and g, whatever the dtype is
  bool gate = false;  // g = dy · silu(z), rounded to the dtype
};
// `gradient`: a member of SsdGradients. Returns no roundings for a kernel that does not round factors, i.e. on CPUs.
SsdRoundings ssd_roundings(std::vector<double> SsdGradients::*gradient, const SsmSpec& spec, bool rounds_factors);

// The error that a kernel's roundings may cause, except for its last one, relative to the sum of the absolute values of
// the gradient's terms. It is an upper bound for all inputs, reached if all roundings of all terms are as large as
// possible and have the same sign. For fp32 it is 1e-4: decays are exponentials of sums, and large sums have steps of
// 2^−15.
double ssd_gradient_term(const SsdRoundings& roundings, Dtype dtype);
// The same for the root mean square error of many elements, relative to their root mean square. Roundings of different
// factors are independent, and a sum of terms with random signs is as large as the root of the sum of their squares.
double ssd_gradient_rms(const SsdRoundings& roundings, Dtype dtype);

}  // namespace ringattn
