// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/ssm_oracle.hpp"

#include <algorithm>
#include <cmath>

namespace ringattn {

namespace {

double element(const TensorView& view, std::int64_t row, std::int64_t head, std::int64_t dim) {
  return static_cast<double>(
      load_element(view.at(row, head) + dim * static_cast<std::int64_t>(size_of(view.dtype)), view.dtype));
}

// Log-decay of state n by a token of linear attention.
double oracle_log_decay(const SsmSpec& spec, const SsmTask& task, std::int64_t row, int head, std::int64_t n) {
  if (spec.decay == SsmDecay::kHead) return static_cast<double>(task.a[head]);
  return element(task.dt, row, head, spec.decay == SsmDecay::kDim ? n : 0);
}

double oracle_dt(const SsmSpec& spec, const SsmTask& task, std::int64_t row, int head) {
  if (spec.decay != SsmDecay::kDt) return 1.0;
  double dt = element(task.dt, row, head, 0);
  if (spec.dt_bias) dt += static_cast<double>(task.dt_bias[head]);
  if (spec.dt_softplus) dt = dt > 40.0 ? dt : std::log1p(std::exp(dt));
  if (std::isnan(dt)) return dt;
  return std::min(std::max(dt, static_cast<double>(spec.dt_min)), static_cast<double>(spec.dt_max));
}

}  // namespace

std::vector<double> oracle_ssm(const SsmSpec& spec, const SsmTask& task, std::int64_t row, std::int64_t tokens,
                               std::vector<double>& state) {
  const auto dims = static_cast<std::size_t>(spec.head_dim);
  const auto states = static_cast<std::size_t>(spec.state_dim);
  state.resize(static_cast<std::size_t>(spec.heads) * dims * states, 0.0);
  std::vector<double> y;
  y.reserve(static_cast<std::size_t>(tokens * spec.heads) * dims);
  std::vector<double> decay(states), b(states), c(states);
  for (std::int64_t t = row; t < row + tokens; ++t) {
    for (int head = 0; head < spec.heads; ++head) {
      const int group = head / (spec.heads / spec.groups);
      const double dt = oracle_dt(spec, task, t, head);
      for (std::size_t n = 0; n < states; ++n) {
        const auto at = static_cast<std::int64_t>(n);
        if (spec.decay != SsmDecay::kDt) {
          decay[n] = std::exp(oracle_log_decay(spec, task, t, head, at));
        } else if (n == 0 || spec.state_decays) {
          const float a = spec.state_decays ? task.a[head * spec.state_dim + at] : task.a[head];
          decay[n] = std::exp(dt * static_cast<double>(a));
        } else {
          decay[n] = decay[0];
        }
        b[n] = element(task.b, t, group, at);
        c[n] = element(task.c, t, group, at);
      }
      for (std::size_t p = 0; p < dims; ++p) {
        const double x = element(task.x, t, head, static_cast<std::int64_t>(p));
        double* const s = state.data() + (static_cast<std::size_t>(head) * dims + p) * states;
        double sum = 0.0;
        for (std::size_t n = 0; n < states; ++n) {
          s[n] = decay[n] * s[n] + dt * x * b[n];
          sum += s[n] * c[n];
        }
        sum *= static_cast<double>(spec.scale);
        if (spec.skip) sum += static_cast<double>(task.d[head]) * x;
        if (spec.gate) {
          const double z = element(task.z, t, head, static_cast<std::int64_t>(p));
          sum *= z / (1.0 + std::exp(-z));
        }
        y.push_back(sum);
      }
    }
  }
  return y;
}

std::vector<double> oracle_conv1d(const CausalConv1dSpec& spec, const TensorView& x, const float* weight,
                                  const float* bias, std::int64_t row, std::int64_t tokens) {
  std::vector<double> y;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int c = 0; c < spec.channels; ++c) {
      double sum = spec.bias ? static_cast<double>(bias[c]) : 0.0;
      for (int back = 0; back < spec.width && back <= t; ++back) {
        sum += static_cast<double>(weight[c * spec.width + spec.width - 1 - back]) * element(x, row + t - back, 0, c);
      }
      y.push_back(spec.silu ? sum / (1.0 + std::exp(-sum)) : sum);
    }
  }
  return y;
}

Conv1dChannelGradients oracle_conv1d_gradients(const CausalConv1dSpec& spec, const Conv1dChannel& channel) {
  const auto width = static_cast<std::size_t>(spec.width);
  const std::size_t tokens = channel.dy.size();
  Conv1dChannelGradients made;
  made.dtokens.assign(channel.tokens.size(), 0.0);
  made.dtokens_size = made.dtokens;
  made.dtaps.assign(width + 1, 0.0);
  made.dtaps_size = made.dtaps;
  const auto add = [](double factor, double g, double g_size, double& sum, double& size) {
    sum += factor * g;
    size += std::abs(factor) * g_size;
  };
  for (std::size_t i = 0; i < channel.dfinal.size(); ++i) {
    const double dfinal = channel.dfinal[i];
    add(1.0, dfinal, std::abs(dfinal), made.dtokens[tokens + i], made.dtokens_size[tokens + i]);
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    double v = channel.bias;
    for (std::size_t k = 0; k < width; ++k) v += channel.taps[k] * channel.tokens[t + k];
    const double s = 1.0 / (1.0 + std::exp(-v));
    const auto slope = [&](double term) {
      if (!spec.silu) return 1.0;
      return std::isinf(v) ? s : s * (1.0 + term * (1.0 - s));  // at infinite v the product would be ∞ · 0
    };
    const double g = channel.dy[t] * slope(v);
    // The terms of silu' may cancel each other.
    const double g_size = std::abs(channel.dy[t]) * slope(std::abs(v));
    for (std::size_t k = 0; k < width; ++k) {
      add(channel.taps[k], g, g_size, made.dtokens[t + k], made.dtokens_size[t + k]);
      add(channel.tokens[t + k], g, g_size, made.dtaps[k], made.dtaps_size[k]);
    }
    add(1.0, g, g_size, made.dtaps[width], made.dtaps_size[width]);
  }
  return made;
}

}  // namespace ringattn
