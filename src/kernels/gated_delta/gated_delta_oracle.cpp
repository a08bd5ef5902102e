// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/gated_delta_oracle.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ringattn {

namespace {

constexpr double kFp32Unit = 0x1p-24;
constexpr double kMinLog2 = -150.0;  // of a token's decay
constexpr double kRoundedFactors = 4.0;
constexpr double kSafety = 4.0;  // the root of a sum of squares is a standard deviation

double unit_of(Dtype dtype) {
  if (dtype == Dtype::kBf16) return 0x1p-9;
  return dtype == Dtype::kF16 ? 0x1p-12 : 0.0;
}

double norm_of(std::span<const double> values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

std::vector<double> row_of(const TensorView& view, std::int64_t row, std::int64_t head) {
  std::vector<double> values(static_cast<std::size_t>(view.dim));
  const std::byte* const source = view.at(row, head);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<double>(load_element(source + i * size_of(view.dtype), view.dtype));
  }
  return values;
}

}  // namespace

GatedDeltaOracle::GatedDeltaOracle(const GatedDeltaSpec& spec, bool rounded, const float* initial)
    : spec_(spec),
      keys_(static_cast<std::size_t>(spec.key_dim)),
      values_(static_cast<std::size_t>(spec.value_dim)),
      rounding_(rounded ? kRoundedFactors * unit_of(spec.dtype) : 0.0),
      state_(keys_ * values_, 0.0),
      o_(values_, 0.0),
      o_error_(values_, 0.0),
      log_sums_(static_cast<std::size_t>(spec.decay_dim()), 0.0),
      squares_(values_, 0.0) {
  if (initial != nullptr) std::copy_n(initial, state_.size(), state_.begin());
  terms_ = before_segment_ = column_norms();
}

std::vector<double> GatedDeltaOracle::column_norms() const {
  std::vector<double> norms(values_, 0.0);
  for (std::size_t d = 0; d < keys_; ++d) {
    for (std::size_t c = 0; c < values_; ++c) norms[c] += state_[d * values_ + c] * state_[d * values_ + c];
  }
  for (double& norm : norms) norm = std::sqrt(norm);
  return norms;
}

std::vector<double> GatedDeltaOracle::normalized(std::span<const double> row) const {
  std::vector<double> result(row.begin(), row.end());
  if (!spec_.qk_l2norm) return result;
  double sum = static_cast<double>(kQkL2NormEps);
  for (const double value : row) sum += value * value;
  for (double& value : result) value /= std::sqrt(sum);
  return result;
}

void GatedDeltaOracle::add(std::span<const double> q_row, std::span<const double> k_row, std::span<const double> v,
                           std::span<const double> log_decay, double beta) {
  const std::vector<double> q = normalized(q_row);
  const std::vector<double> k = normalized(k_row);
  const double scale = static_cast<double>(scale_of(spec_));
  if (tokens_ % kSegmentTokens == 0) before_segment_ = column_norms();
  if (tokens_ % kChunkTokens == 0) {
    terms_ = column_norms();
    std::ranges::fill(log_sums_, 0.0);
  }
  double greatest_sum = 0.0;
  double greatest_decay = 0.0;
  for (std::size_t d = 0; d < log_sums_.size(); ++d) {
    log_sums_[d] += std::max(log_decay[d] * std::numbers::log2e, kMinLog2);
    greatest_sum = std::max(greatest_sum, std::abs(log_sums_[d]));
    greatest_decay = std::max(greatest_decay, std::exp(log_decay[d]));
  }
  const double additions = static_cast<double>(spec_.key_dim + 2 * kChunkTokens);
  const double in_chunk = static_cast<double>(tokens_ % kChunkTokens + 1);
  epsilon_ = kFp32Unit * (additions + in_chunk * greatest_sum) + rounding_;
  const double k_norm = norm_of(k);
  const double growth = greatest_decay * std::max(1.0, std::abs(1.0 - beta * k_norm * k_norm));

  std::vector<double> read(values_, 0.0);  // S'ᵀ · k
  for (std::size_t d = 0; d < keys_; ++d) {
    const double decay = std::exp(log_decay[spec_.key_decays ? d : 0]);
    for (std::size_t c = 0; c < values_; ++c) {
      double& s = state_[d * values_ + c];
      s *= decay;
      read[c] += s * k[d];
    }
  }
  std::ranges::fill(o_, 0.0);
  const double q_norm = norm_of(q);
  for (std::size_t c = 0; c < values_; ++c) {
    const double u = beta * (v[c] - read[c]);
    for (std::size_t d = 0; d < keys_; ++d) {
      double& s = state_[d * values_ + c];
      s += k[d] * u;
      o_[c] += scale * s * q[d];
    }
    terms_[c] *= greatest_decay;
    before_segment_[c] *= growth;
    const double size = terms_[c] + 2.0 * before_segment_[c];
    const double added = epsilon_ * k_norm * std::abs(beta) * (std::abs(v[c]) + k_norm * size);
    squares_[c] = growth * growth * squares_[c] + added * added;
    terms_[c] += k_norm * std::abs(u);
    const double all = terms_[c] + 2.0 * before_segment_[c];
    o_error_[c] = kSafety * std::abs(scale) * q_norm * (std::sqrt(squares_[c]) + epsilon_ * all);
    // The state is a sum over the chunk's tokens too.
    if ((tokens_ + 1) % kChunkTokens == 0) squares_[c] += epsilon_ * all * epsilon_ * all;
  }
  ++tokens_;
}

void GatedDeltaOracle::add(const GatedDeltaTask& task, std::int64_t row, int head) {
  const int key_head = head / spec_.heads_per_key();
  add(row_of(task.q, row, key_head), row_of(task.k, row, key_head), row_of(task.v, row, head),
      row_of(task.log_decay, row, head), row_of(task.beta, row, head).front());
}

std::vector<double> GatedDeltaOracle::state_error() const {
  std::vector<double> errors(values_);
  for (std::size_t c = 0; c < values_; ++c) {
    errors[c] = kSafety * (std::sqrt(squares_[c]) + epsilon_ * (terms_[c] + 2.0 * before_segment_[c]));
  }
  return errors;
}

}  // namespace ringattn
