// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/segment_terms.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/ssm/ssm.hpp"

namespace ringattn {

namespace {

constexpr double kLeastLog = -150.0 * std::numbers::ln2;  // the least log-decay of a token (kernels/ssm/ssm.hpp)
constexpr std::size_t kSubChunk = 16;                     // tokens (kernels/ssm/sm80/gla.cuh)

}  // namespace

void SegmentTerms::begin_chunk(std::span<const double> state) {
  if (chunks_++ % (kSegmentTokens / kChunkTokens) == 0) {
    b_.clear();
    scaled_.clear();
    decays_.clear();
  }
  before_ = decays_.size() / decay_count_;
  state_.assign(state.begin(), state.end());
}

void SegmentTerms::add(std::span<const double> log_decays, std::span<const double> scaled, std::span<const double> b) {
  for (std::size_t i = 0; i < decay_count_; ++i) decays_.push_back(std::max(log_decays[i], kLeastLog));
  scaled_.insert(scaled_.end(), scaled.begin(), scaled.end());
  b_.insert(b_.end(), b.begin(), b.end());
}

std::vector<double> SegmentTerms::spread(std::span<const double> c, double skip, std::span<const double> x) const {
  std::vector<double> squares = decay_count_ == 1 ? squares_of_heads(c, skip, x) : squares_of_dims(c);
  for (double& square : squares) square = std::sqrt(square);
  return squares;
}

std::vector<double> SegmentTerms::squares_of_heads(std::span<const double> c, double skip,
                                                   std::span<const double> x) const {
  std::vector<double> squares(head_dim_, 0.0);
  double log = 0.0;  // log of the decay after token j
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
  return squares;
}

// A term is the product of an element of q, one of k and one of v. Within a chunk, an element of q is rounded once for
// all tokens of a sub-chunk.
std::vector<double> SegmentTerms::squares_of_dims(std::span<const double> c) const {
  std::vector<double> squares(head_dim_, 0.0);
  std::vector<double> logs(state_dim_, 0.0);              // logs of the decays after token j
  std::vector<double> of_q(head_dim_ * state_dim_, 0.0);  // sums over the tokens of a sub-chunk
  std::vector<double> weights(state_dim_);
  for (std::size_t j = b_.size() / state_dim_; j-- > 0;) {
    double score = 0.0;
    double square = 0.0;
    for (std::size_t n = 0; n < state_dim_; ++n) {
      weights[n] = c[n] * b_[j * state_dim_ + n] * std::exp(logs[n]);
      score += weights[n];
      square += weights[n] * weights[n];
      logs[n] += decays_[j * state_dim_ + n];
    }
    const bool in_chunk = j >= before_;
    for (std::size_t p = 0; p < head_dim_; ++p) {
      const double v = scaled_[j * head_dim_ + p];
      squares[p] += v * v * (square + (in_chunk ? score * score : 0.0));
      if (!in_chunk) continue;
      for (std::size_t n = 0; n < state_dim_; ++n) of_q[p * state_dim_ + n] += weights[n] * v;
    }
    if (!in_chunk || (j - before_) % kSubChunk != 0) continue;
    for (std::size_t p = 0; p < head_dim_; ++p) {
      for (std::size_t n = 0; n < state_dim_; ++n) {
        double& sum = of_q[p * state_dim_ + n];
        squares[p] += sum * sum;
        sum = 0.0;
        if (j != before_) continue;
        const double term = c[n] * state_[p * state_dim_ + n] * std::exp(logs[n]);
        squares[p] += 2.0 * term * term;
      }
    }
  }
  return squares;
}

}  // namespace ringattn
