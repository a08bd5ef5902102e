// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of the gated delta rule: its recurrence, token by token, sharing no code with the kernels, and a
// bound for the error of a kernel's arithmetic (gated_delta.hpp). Accuracy is measured against it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn {

// One value head of one sequence.
//
// The bound. An error δ of u_i acts on everything after it as an error δ of β_i · v_i would, so it follows the exact
// recurrence: it adds k_i ⊗ δ to the error of S, which decays as S does and otherwise grows by at most
// max(1, |1 − β ‖k‖²|) a token. Roundings are independent of each other, so their squares are added:
//
//   E²[d, c] ← α_d² · growth² · E²[d, c] + k_d² · δ_c²       δ_c² = β² ε² (v_c² + Σ_d k_d² X²[d, c])
//
// X² is the sum of the squares of the terms that S is made of in this chunk: of the state before the chunk, the
// k_j ⊗ u_j, and twice the decayed state before the segment, because M and U are computed apart. The error of o is then
// at most six standard deviations, scale · √(‖q‖² Σ_d E² + ε² Σ_d q_d² X²): all of E may lie along q.
//
// ε is 2^−24 · √(additions of a sum), and 2^−24 · |G| · √(additions of G) for decays; if the kernel rounds its factors,
// those of four of them, half of a unit of the dtype divided by √3 each, come on top.
//
// Rounded factors of tokens with equal keys, as repeated tokens have, are equal, and so are their roundings. The errors
// of such tokens do not cancel: within a chunk, whose tokens share a T, they also add up as
// L[d, c] ← α_d · growth · L[d, c] + k_d · δ_c, with the sign of v_c. L² is added to E². Where keys or values vary at
// random, L² is about what E² grows by in the chunk.
class GatedDeltaOracle {
 public:
  // `initial`: [key_dim, value_dim], or null for zero. `rounded`: the kernel rounds factors of chunk products.
  GatedDeltaOracle(const GatedDeltaSpec& spec, bool rounded, const float* initial);

  // The next token. q, k: [key_dim], v: [value_dim], log_decay: [decay_dim].
  void add(std::span<const double> q, std::span<const double> k, std::span<const double> v,
           std::span<const double> log_decay, double beta);
  // Token `row` of a task's tensors in host memory. The task's runs and o are not used.
  void add(const GatedDeltaTask& task, std::int64_t row, int head);

  // The row of the last token before the last rounding, and its maximum error: [value_dim].
  const std::vector<double>& o() const { return o_; }
  const std::vector<double>& o_error() const { return o_error_; }
  // The state, [key_dim, value_dim], and the maximum error of its elements: [value_dim], the same for all rows of a
  // column.
  const std::vector<double>& state() const { return state_; }
  std::vector<double> state_error() const;

 private:
  std::vector<double> normalized(std::span<const double> row) const;
  void begin_token();
  double decay(std::size_t dim, std::span<const double> log_decay) const;

  GatedDeltaSpec spec_;
  std::size_t keys_;
  std::size_t values_;
  double rounding_;  // of a chunk product's factors
  std::int64_t tokens_ = 0;
  std::vector<double> state_;
  std::vector<double> o_, o_error_;
  std::vector<double> log_sums_;  // [decay_dim]: G
  double epsilon_ = 0.0;
  std::vector<double> errors_, terms_, before_segment_;  // [key_dim, value_dim], squares
  std::vector<double> equal_errors_;                     // [key_dim, value_dim]: L
};

}  // namespace ringattn
