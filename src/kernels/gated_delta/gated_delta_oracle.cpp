// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/gated_delta_oracle.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ringattn {

namespace {

constexpr double kFp32Unit = 0x1p-24;
constexpr double kMinLog2 = -150.0;       // of a token's decay
constexpr double kRoundedFactors = 2.0;   // the root of four
constexpr double kDeltaDeviations = 6.0;  // that are allowed

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
      rounding_(rounded ? kRoundedFactors * unit_of(spec.dtype) / std::numbers::sqrt3 : 0.0),
      state_(keys_ * values_, 0.0),
      o_(values_, 0.0),
      o_error_(values_, 0.0),
      log_sums_(static_cast<std::size_t>(spec.decay_dim()), 0.0),
      errors_(state_.size(), 0.0),
      terms_(state_.size(), 0.0),
      before_segment_(state_.size(), 0.0),
      equal_errors_(state_.size(), 0.0) {
  if (initial != nullptr) std::copy_n(initial, state_.size(), state_.begin());
}

std::vector<double> GatedDeltaOracle::normalized(std::span<const double> row) const {
  std::vector<double> result(row.begin(), row.end());
  if (!spec_.qk_l2norm) return result;
  double sum = static_cast<double>(kQkL2NormEps);
  for (const double value : row) sum += value * value;
  for (double& value : result) value /= std::sqrt(sum);
  return result;
}

// Segments and chunks begin with the state as it is.
void GatedDeltaOracle::begin_token() {
  const bool segment = tokens_ % kSegmentTokens == 0;
  if (tokens_ % kChunkTokens != 0) return;
  std::ranges::fill(log_sums_, 0.0);
  for (std::size_t i = 0; i < state_.size(); ++i) {
    // The state itself is a sum over the last chunk's tokens.
    errors_[i] += epsilon_ * epsilon_ * (terms_[i] + 2.0 * before_segment_[i]) + equal_errors_[i] * equal_errors_[i];
    equal_errors_[i] = 0.0;
    terms_[i] = state_[i] * state_[i];
    if (segment) before_segment_[i] = terms_[i];
  }
}

double GatedDeltaOracle::decay(std::size_t dim, std::span<const double> log_decay) const {
  return std::exp(log_decay[spec_.key_decays ? dim : 0]);
}

void GatedDeltaOracle::add(std::span<const double> q_row, std::span<const double> k_row, std::span<const double> v,
                           std::span<const double> log_decay, double beta) {
  const std::vector<double> q = normalized(q_row);
  const std::vector<double> k = normalized(k_row);
  const double scale = static_cast<double>(scale_of(spec_));
  begin_token();
  double greatest_sum = 0.0;
  for (std::size_t d = 0; d < log_sums_.size(); ++d) {
    log_sums_[d] += std::max(log_decay[d] * std::numbers::log2e, kMinLog2);
    greatest_sum = std::max(greatest_sum, std::abs(log_sums_[d]));
  }
  const double additions = static_cast<double>(spec_.key_dim + 2 * kChunkTokens);
  const double in_chunk = static_cast<double>(tokens_ % kChunkTokens + 1);
  epsilon_ = std::hypot(kFp32Unit * (std::sqrt(additions) + std::sqrt(in_chunk) * greatest_sum), rounding_);
  const double k_norm = norm_of(k);
  const double q_norm = norm_of(q);
  const double growth = std::max(1.0, std::abs(1.0 - beta * k_norm * k_norm));

  std::vector<double> read(values_, 0.0);    // S'ᵀ · k
  std::vector<double> spread(values_, 0.0);  // Σ_d k_d² X²
  for (std::size_t d = 0; d < keys_; ++d) {
    const double alpha = decay(d, log_decay);
    const double squared = alpha * alpha;
    for (std::size_t at = d * values_; at < (d + 1) * values_; ++at) {
      state_[at] *= alpha;
      terms_[at] *= squared;
      before_segment_[at] *= squared;
      errors_[at] *= squared * growth * growth;
      equal_errors_[at] *= alpha * growth;
      read[at - d * values_] += state_[at] * k[d];
      spread[at - d * values_] += k[d] * k[d] * (terms_[at] + 2.0 * before_segment_[at]);
    }
  }
  std::vector<double>& u = read;
  std::vector<double>& lost = spread;
  std::vector<double> equal(values_, 0.0);
  for (std::size_t c = 0; c < values_; ++c) {
    u[c] = beta * (v[c] - read[c]);
    lost[c] = beta * epsilon_ * beta * epsilon_ * (v[c] * v[c] + spread[c]);
    if (rounding_ > 0.0) equal[c] = std::copysign(std::sqrt(lost[c]), v[c]);
  }
  std::vector<double> sum(values_, 0.0);
  std::vector<double> error(values_, 0.0);
  for (std::size_t d = 0; d < keys_; ++d) {  // row by row, as they lie in memory
    for (std::size_t c = 0; c < values_; ++c) {
      const std::size_t at = d * values_ + c;
      state_[at] += k[d] * u[c];
      terms_[at] += k[d] * u[c] * k[d] * u[c];
      errors_[at] += k[d] * k[d] * lost[c];
      equal_errors_[at] += k[d] * equal[c];
      sum[c] += state_[at] * q[d];
      error[c] += q_norm * q_norm * (errors_[at] + equal_errors_[at] * equal_errors_[at]) +
                  epsilon_ * epsilon_ * q[d] * q[d] * (terms_[at] + 2.0 * before_segment_[at]);
    }
  }
  for (std::size_t c = 0; c < values_; ++c) {
    o_[c] = scale * sum[c];
    o_error_[c] = kDeltaDeviations * std::abs(scale) * std::sqrt(error[c]);
  }
  ++tokens_;
}

void GatedDeltaOracle::add(const GatedDeltaTask& task, std::int64_t row, int head) {
  const int key_head = head / spec_.heads_per_key();
  add(row_of(task.q, row, key_head), row_of(task.k, row, key_head), row_of(task.v, row, head),
      row_of(task.log_decay, row, head), row_of(task.beta, row, head).front());
}

std::vector<double> GatedDeltaOracle::state_error() const {
  std::vector<double> errors(values_, 0.0);
  for (std::size_t at = 0; at < state_.size(); ++at) {
    errors[at % values_] += errors_[at] + equal_errors_[at] * equal_errors_[at] +
                            epsilon_ * epsilon_ * (terms_[at] + 2.0 * before_segment_[at]);
  }
  for (double& error : errors) error = kDeltaDeviations * std::sqrt(error);
  return errors;
}

}  // namespace ringattn
