// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of the gated delta rule: its recurrence, token by token, sharing no code with the kernels, and a
// bound of what a kernel's arithmetic (gated_delta.hpp) may lose. Accuracy is measured against it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn {

// One value head of one sequence.
//
// The bound. An error δ of u_i acts on everything after it as an error δ of β_i · v_i would, so it follows the exact
// recurrence: the error of a column of S grows by at most ρ = max α · max(1, |1 − β ‖k‖²|) a token, and δ adds ‖k_i‖ ·
// δ to it. u_i is a sum whose terms are at most |v_i| + ‖k_i‖ · (m + 2 r). Here m is the size of the terms in a chunk:
// the norm of the column before it, then decayed and with ‖k_j‖ · |u_j| of each token added. r is the norm of the
// column before the segment, multiplied by ρ since, because a segment's M and U are computed apart from each other. δ
// is ε times the terms. ε is 2^−24 for each of the sum's additions and 2^−24 · |G| for each addition in G, and if the
// kernel rounds its factors, four units of the dtype. Errors of different tokens are independent, so that their squares
// are added.
class GatedDeltaOracle {
 public:
  // `initial`: [key_dim, value_dim], or null for zero. `rounded`: the kernel rounds factors of chunk products.
  GatedDeltaOracle(const GatedDeltaSpec& spec, bool rounded, const float* initial);

  // The next token. q, k: [key_dim], v: [value_dim], log_decay: [decay_dim].
  void add(std::span<const double> q, std::span<const double> k, std::span<const double> v,
           std::span<const double> log_decay, double beta);
  // Token `row` of a task's tensors in host memory. The task's runs and o are not used.
  void add(const GatedDeltaTask& task, std::int64_t row, int head);

  // The row of the last token before the last rounding, and how far off it may be: [value_dim].
  const std::vector<double>& o() const { return o_; }
  const std::vector<double>& o_error() const { return o_error_; }
  // The state, [key_dim, value_dim], and how far off its elements may be: [value_dim], all rows of a column alike.
  const std::vector<double>& state() const { return state_; }
  std::vector<double> state_error() const;

 private:
  std::vector<double> normalized(std::span<const double> row) const;
  std::vector<double> column_norms() const;

  GatedDeltaSpec spec_;
  std::size_t keys_;
  std::size_t values_;
  double rounding_;  // of a chunk product's factors
  std::int64_t tokens_ = 0;
  std::vector<double> state_;
  std::vector<double> o_, o_error_;
  std::vector<double> log_sums_;  // [decay_dim]: G
  double epsilon_ = 0.0;
  std::vector<double> squares_, terms_, before_segment_;  // [value_dim]: squared errors, m and r
};

}  // namespace ringattn
