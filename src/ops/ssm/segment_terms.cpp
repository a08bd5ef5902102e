// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/segment_terms.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/ssm/ssm.hpp"

namespace ringattn {

namespace {

constexpr double kLeastLog = -150.0 * std::numbers::ln2;  // of a token's decay (kernels/ssm/ssm.hpp)

}  // namespace

void SegmentTerms::begin_chunk(std::span<const double> state) {
  if (chunks_++ % (kSegmentTokens / kChunkTokens) == 0) {
    b_.clear();
    scaled_.clear();
    decays_.clear();
  }
  before_ = decays_.size();
  state_.assign(state.begin(), state.end());
}

void SegmentTerms::add(double log_decay, std::span<const double> scaled, std::span<const double> b) {
  decays_.push_back(std::max(log_decay, kLeastLog));
  scaled_.insert(scaled_.end(), scaled.begin(), scaled.end());
  b_.insert(b_.end(), b.begin(), b.end());
}

std::vector<double> SegmentTerms::spread(std::span<const double> c, double skip, std::span<const double> x) const {
  std::vector<double> squares(head_dim_, 0.0);
  double log = 0.0;  // of the decay after token j
  for (std::size_t j = decays_.size(); j-- > 0;) {
    double score = 0.0;
    for (std::size_t n = 0; n < state_dim_; ++n) score += c[n] * b_[j * state_dim_ + n];
    const double weight = score * std::exp(log);
    const double times = j < before_ ? 2.0 : 1.0;
    for (std::size_t p = 0; p < head_dim_; ++p) {
      const double own = j + 1 == decays_.size() ? skip * x[p] : 0.0;
      const double term = weight * scaled_[j * head_dim_ + p] + own;
      squares[p] += times * term * term;
    }
    log += decays_[j];
    if (j != before_) continue;
    const double decay = std::exp(log);
    for (std::size_t p = 0; p < head_dim_; ++p) {
      for (std::size_t n = 0; n < state_dim_; ++n) {
        const double term = c[n] * state_[p * state_dim_ + n] * decay;
        squares[p] += term * term;
      }
    }
  }
  for (double& square : squares) square = std::sqrt(square);
  return squares;
}

}  // namespace ringattn
