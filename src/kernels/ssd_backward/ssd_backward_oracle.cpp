// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssd_backward/ssd_backward_oracle.hpp"

#include <algorithm>
#include <cmath>

namespace ringattn {

namespace {

constexpr std::int64_t kBlockTokens = 64;  // between states that are kept; those between them are computed again

constexpr double kFp32Term = 1e-4;
constexpr double kBf16Rounding = 0x1p-8;  // the largest relative error
double gate_rounding(Dtype dtype) { return dtype == Dtype::kBf16 ? kBf16Rounding : 0x1p-11; }

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

double logistic(double value) { return 1.0 / (1.0 + std::exp(-value)); }

// One head of a sequence.
class HeadOracle {
 public:
  HeadOracle(const SsmSpec& spec, const SsdBackwardTask& task, std::int64_t row, std::int64_t tokens, int head,
             OracleTerms terms)
      : spec_(spec),
        task_(task),
        row_(row),
        tokens_(tokens),
        head_(head),
        magnitudes_(terms == OracleTerms::kMagnitudes),
        dims_(size(spec.head_dim)),
        states_(size(spec.state_dim)) {}

  // `state` is the initial state. `gradient` is the gradient of the final state, and is replaced by that of the initial
  // one.
  void differentiate(std::vector<double> state, std::vector<double>& gradient, SsdGradients& out) const {
    std::vector<std::vector<double>> kept;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      if (t % kBlockTokens == 0) kept.push_back(state);
      update(t, state);
    }
    for (std::int64_t block = static_cast<std::int64_t>(kept.size()) - 1; block >= 0; --block) {
      const std::int64_t begin = block * kBlockTokens;
      std::vector<std::vector<double>> states{kept[size(block)]};
      for (std::int64_t t = begin; t < std::min(tokens_, begin + kBlockTokens); ++t) {
        states.push_back(states.back());
        update(t, states.back());
      }
      while (states.size() > 1) {
        const std::int64_t t = begin + static_cast<std::int64_t>(states.size()) - 2;
        differentiate_token(t, states[states.size() - 2], states.back(), gradient, out);
        states.pop_back();
      }
    }
  }

 private:
  struct Dt {
    double value = 0.0;
    double slope = 0.0;  // derivative of `value` by the dt that is given
  };

  double signed_or_not(double value) const { return magnitudes_ ? std::abs(value) : value; }
  double element(const TensorView& view, std::int64_t t, std::int64_t head, std::size_t dim) const {
    return static_cast<double>(load_element(view.at(row_ + t, head) + dim * size_of(view.dtype), view.dtype));
  }
  // The row of a head, or of its group of B and C.
  std::vector<double> factors(const TensorView& view, std::int64_t t, std::int64_t head) const {
    std::vector<double> row(size(view.dim));
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = signed_or_not(element(view, t, head, i));
    return row;
  }
  int group() const { return head_ / (spec_.heads / spec_.groups); }
  double a() const { return static_cast<double>(task_.a[head_]); }
  double d() const { return spec_.skip ? signed_or_not(static_cast<double>(task_.d[head_])) : 0.0; }

  Dt dt(std::int64_t t) const {
    double value = element(task_.dt, t, head_, 0);
    if (spec_.dt_bias) value += static_cast<double>(task_.dt_bias[head_]);
    double slope = 1.0;
    if (spec_.dt_softplus) {
      slope = logistic(value);
      value = value > 40.0 ? value : std::log1p(std::exp(value));
    }
    const double low = static_cast<double>(spec_.dt_min);
    const double high = static_cast<double>(spec_.dt_max);
    if (value < low || value > high) return {value < low ? low : high, 0.0};
    return {value, slope};
  }

  void update(std::int64_t t, std::vector<double>& state) const {
    const double step = dt(t).value;
    const double decay = std::exp(step * a());
    const std::vector<double> x = factors(task_.x, t, head_);
    const std::vector<double> b = factors(task_.b, t, group());
    for (std::size_t p = 0; p < dims_; ++p) {
      const double input = signed_or_not(step) * x[p];
      for (std::size_t n = 0; n < states_; ++n) {
        state[p * states_ + n] = decay * state[p * states_ + n] + input * b[n];
      }
    }
  }

  // `gradient` is the gradient of the state after the token, without the term of the token's own y. It is replaced by
  // the gradient of the state before the token.
  void differentiate_token(std::int64_t t, const std::vector<double>& before, const std::vector<double>& after,
                           std::vector<double>& gradient, SsdGradients& out) const {
    const Dt step = dt(t);
    const double decay = std::exp(step.value * a());
    const double dt_factor = signed_or_not(step.value);
    const std::vector<double> x = factors(task_.x, t, head_);
    const std::vector<double> b = factors(task_.b, t, group());
    const std::vector<double> c = factors(task_.c, t, group());
    std::vector<double> g = factors(task_.dy, t, head_);
    const std::size_t rows = size(t * spec_.heads + head_);
    if (spec_.gate) {
      for (std::size_t p = 0; p < dims_; ++p) {
        const double z = element(task_.z, t, head_, p);
        const double sigmoid = logistic(z);
        double y = d() * x[p];
        for (std::size_t n = 0; n < states_; ++n) y += after[p * states_ + n] * c[n];
        // At infinite z the derivative of silu is the logistic function, because the product would be ∞ · 0.
        const double slope = std::isinf(z) ? sigmoid : sigmoid * (1.0 + signed_or_not(z) * (1.0 - sigmoid));
        out.dz[rows * dims_ + p] = g[p] * y * slope;
        g[p] *= signed_or_not(z * sigmoid);
      }
    }
    double* const db = out.db.data() + size(t * spec_.groups + group()) * states_;
    double* const dc = out.dc.data() + size(t * spec_.groups + group()) * states_;
    double e = 0.0;  // gradient of dt
    double q = 0.0;  // gradient of the log-decay
    for (std::size_t p = 0; p < dims_; ++p) {
      double input = 0.0;  // gradient of dt · x
      for (std::size_t n = 0; n < states_; ++n) {
        double& of_state = gradient[p * states_ + n];
        of_state += g[p] * c[n];
        input += of_state * b[n];
        db[n] += dt_factor * of_state * x[p];
        dc[n] += after[p * states_ + n] * g[p];
        q += decay * of_state * before[p * states_ + n];
        of_state *= decay;
      }
      out.dx[rows * dims_ + p] = dt_factor * input + d() * g[p];
      e += x[p] * input;
      if (spec_.skip) out.dd[size(head_)] += g[p] * x[p];
    }
    const double ddt = (e + signed_or_not(a()) * q) * step.slope;
    out.ddt[rows] = ddt;
    out.da[size(head_)] += dt_factor * q;
    if (spec_.dt_bias) out.ddt_bias[size(head_)] += ddt;
  }

  const SsmSpec& spec_;
  const SsdBackwardTask& task_;
  std::int64_t row_;
  std::int64_t tokens_;
  int head_;
  bool magnitudes_;
  std::size_t dims_;
  std::size_t states_;
};

}  // namespace

SsdGradients oracle_ssd_backward(const SsmSpec& spec, const SsdBackwardTask& task, std::int64_t row,
                                 std::int64_t tokens, std::span<const float> initial,
                                 std::span<const float> final_gradient, OracleTerms terms) {
  const std::size_t heads = size(spec.heads);
  const std::size_t head_state = size(std::int64_t{spec.head_dim} * spec.state_dim);
  SsdGradients out;
  out.dx.resize(size(tokens * spec.heads * spec.head_dim));
  if (spec.gate) out.dz.resize(out.dx.size());
  out.ddt.resize(size(tokens * spec.heads));
  out.db.resize(size(tokens * spec.groups * spec.state_dim));
  out.dc.resize(out.db.size());
  out.da.resize(heads);
  if (spec.skip) out.dd.resize(heads);
  if (spec.dt_bias) out.ddt_bias.resize(heads);
  for (int head = 0; head < spec.heads; ++head) {
    const auto state_of = [&](std::span<const float> states) {
      std::vector<double> state(head_state);
      if (!states.empty()) std::ranges::copy(states.subspan(size(head) * head_state, head_state), state.begin());
      if (terms == OracleTerms::kMagnitudes) {
        for (double& value : state) value = std::abs(value);
      }
      return state;
    };
    std::vector<double> gradient = state_of(final_gradient);
    HeadOracle(spec, task, row, tokens, head, terms).differentiate(state_of(initial), gradient, out);
    out.initial_gradient.insert(out.initial_gradient.end(), gradient.begin(), gradient.end());
  }
  return out;
}

SsdRoundings ssd_roundings(std::vector<double> SsdGradients::*gradient, const SsmSpec& spec, bool rounds_factors) {
  if (!rounds_factors) return {};
  // States of chunks and their gradients: x or g times its scale, and the state that is stored (sm80_ssd_backward).
  constexpr int kState = 2;
  // A row times its scale: roundings of the scale and of the product (sm90_ssd_backward, whose states have one rounding
  // less).
  constexpr int kScaledRow = 2;
  if (gradient == &SsdGradients::dz) return {1 + kScaledRow, false};  // dy as given, and y as of sm90_ssd
  if (gradient == &SsdGradients::dx) return {kState, spec.gate};
  if (gradient == &SsdGradients::db || gradient == &SsdGradients::dc) return {kState - 1 + kScaledRow, spec.gate};
  if (gradient == &SsdGradients::dd || gradient == &SsdGradients::initial_gradient) return {0, spec.gate};
  return {2 * kState, spec.gate};  // ⟨S, G⟩ in ddt, and with it in dA and ddt_bias
}

double ssd_gradient_term(const SsdRoundings& roundings, Dtype dtype) {
  const double gate = roundings.gate ? gate_rounding(dtype) : 0.0;
  return std::pow(1.0 + kBf16Rounding, roundings.bf16) * (1.0 + gate) - 1.0 + kFp32Term;
}

double ssd_gradient_rms(const SsdRoundings& roundings, Dtype dtype) {
  const double gate = roundings.gate ? gate_rounding(dtype) : 0.0;
  // An error that is evenly distributed up to ±u has the variance u² / 3.
  return std::sqrt((roundings.bf16 * kBf16Rounding * kBf16Rounding + gate * gate) / 3.0) + kFp32Term;
}

}  // namespace ringattn
