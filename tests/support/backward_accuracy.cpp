// SPDX-License-Identifier: Apache-2.0
#include "tests/support/backward_accuracy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/attention_backward/backward_oracle.hpp"
#include "tests/support/checks.hpp"

namespace ringattn::testing {

namespace {

float round_to(Dtype dtype, double value) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, static_cast<float>(value));
  return load_element(bytes, dtype);
}

double row_norm(const TensorView& view, std::int64_t token, std::int64_t head) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < view.dim; ++i) {
    const double value =
        load_element(view.at(token, head) + static_cast<std::size_t>(i) * size_of(view.dtype), view.dtype);
    sum += value * value;
  }
  return std::sqrt(sum);
}

double largest_norm(const TensorView& view) {
  double largest = 0.0;
  for (std::int64_t token = 0; token < view.tokens; ++token) {
    for (std::int64_t head = 0; head < view.heads; ++head) largest = std::max(largest, row_norm(view, token, head));
  }
  return largest;
}

bool same_kind(double a, double b) {
  if (std::isfinite(a) || std::isfinite(b)) return std::isfinite(a) && std::isfinite(b);
  return std::isnan(a) == std::isnan(b) && (std::isnan(a) || a == b);
}

// One gradient of one sequence: rows of [tokens, heads, dim].
struct Gradient {
  const char* name;
  const std::vector<double>& exact;
  const std::vector<double>& same_precision;
  const std::byte* values;
  std::int64_t heads;
  std::int64_t dim;
  double slack;
};

std::string check(const Gradient& gradient, Dtype dtype) {
  double error = 0.0;
  double simple = 0.0;
  double rounding = 0.0;
  std::size_t worst = 0;
  const auto place = [&](std::size_t i) {
    const auto row = static_cast<std::int64_t>(i) / gradient.dim;
    return fmt::format("{} at token {}, head {}, dim {}", gradient.name, row / gradient.heads, row % gradient.heads,
                       static_cast<std::int64_t>(i) % gradient.dim);
  };
  for (std::size_t i = 0; i < gradient.exact.size(); ++i) {
    const auto value = static_cast<double>(load_element(gradient.values + i * size_of(dtype), dtype));
    // A value beyond the dtype's range is rounded to ∞.
    const auto expected = static_cast<double>(round_to(dtype, gradient.exact[i]));
    if (!same_kind(value, expected)) {
      return fmt::format("{} is {}, the oracle has {}", place(i), value, gradient.exact[i]);
    }
    if (!std::isfinite(expected)) continue;
    if (std::abs(value - gradient.exact[i]) > error) {
      error = std::abs(value - gradient.exact[i]);
      worst = i;
    }
    const double shifted = round_to(dtype, static_cast<double>(round_to(dtype, expected + 0.3)) - 0.3);
    rounding = std::max(rounding, std::abs(shifted - expected));
    if (std::isfinite(gradient.same_precision[i])) {
      simple = std::max(simple, std::abs(gradient.same_precision[i] - gradient.exact[i]));
    }
  }
  const double allowed = 2.0 * simple + 2.0 * rounding + gradient.slack;
  if (error <= allowed) return {};
  return fmt::format("{} is off by {:.3g}, allowed {:.3g} (oracle {})", place(worst), error, allowed,
                     gradient.exact[worst]);
}

// The row stats and the sinks' terms of one sequence. Adds the terms to `dsinks`, and to `slack` what a sum of them may
// differ by.
std::string check_rows(const BackwardInputs& inputs, const BackwardResult& result, std::size_t sequence,
                       const std::vector<OracleRowStats>& stats, std::vector<double>& dsinks,
                       std::vector<double>& slack) {
  const auto heads = static_cast<std::size_t>(inputs.attention.spec.heads);
  const std::size_t begin = static_cast<std::size_t>(inputs.attention.q_begin(sequence)) * heads;
  for (std::size_t i = 0; i < stats.size(); ++i) {
    const auto token = static_cast<std::int64_t>(i / heads);
    const auto head = static_cast<std::int64_t>(i % heads);
    const double lse = std::isinf(stats[i].lse) && stats[i].lse < 0 ? 0.0 : stats[i].lse * std::numbers::log2e;
    const double lse2 = result.stats[(begin + i) * kRowStats];
    const double delta = result.stats[(begin + i) * kRowStats + 1];
    if (!same_kind(lse2, lse) || (std::isfinite(lse) && std::abs(lse2 - lse) > 0x1p-22 * std::abs(lse))) {
      return fmt::format("LSE · log2 e at token {}, head {} is {}, the oracle has {}", token, head, lse2, lse);
    }
    const double size =
        row_norm(inputs.dout_view(sequence), token, head) * row_norm(inputs.out_view(sequence), token, head);
    const double allowed = 0x1p-20 * size + 0x1p-22 * std::abs(stats[i].delta);
    if (!same_kind(delta, stats[i].delta) || (std::isfinite(delta) && std::abs(delta - stats[i].delta) > allowed)) {
      return fmt::format("delta at token {}, head {} is {}, the oracle has {}", token, head, delta, stats[i].delta);
    }
    if (!inputs.attention.spec.sinks) continue;
    const auto term = static_cast<double>(result.sink_terms[begin + i]);
    dsinks[i % heads] += term;
    slack[i % heads] += 1e-5 * std::abs(term) + allowed;
  }
  return {};
}

}  // namespace

std::string check_gradients(const BackwardInputs& inputs, const BackwardResult& result, ForwardResults forward) {
  if (!result.error.empty()) return result.error;
  const AttentionInputs& attention = inputs.attention;
  const AttentionSpec& spec = attention.spec;
  if (attention.q_tokens() + attention.k_tokens() > 0) count_check();
  const auto heads = static_cast<std::size_t>(spec.heads);
  std::vector<double> dsinks(heads);
  std::vector<double> sink_slack(heads);
  std::vector<double> exact_dsinks(heads);
  for (std::size_t s = 0; s < attention.sequences.size(); ++s) {
    const auto row = static_cast<std::size_t>(attention.q_begin(s)) * heads;
    // RowView has no read-only form.
    const auto row_values = [&](const std::vector<float>& values) {
      return values.empty() ? RowView{} : RowView{const_cast<float*>(values.data()) + row, spec.heads, 1};
    };
    BackwardOracleInputs oracle{attention.q_view(s),
                                attention.k_view(s),
                                attention.v_view(s),
                                inputs.dout_view(s),
                                row_values(inputs.dlse),
                                attention.sequences[s].q_offset,
                                spec.sinks ? attention.sinks.data() : nullptr};
    const TensorView out = inputs.out_view(s);
    const RowView lse = row_values(inputs.lse);
    const std::vector<OracleRowStats> stats = oracle_row_stats(out, lse, oracle.dout, oracle.dlse);
    if (std::string wrong = check_rows(inputs, result, s, stats, dsinks, sink_slack); !wrong.empty()) {
      return fmt::format("sequence {}: {}", s, wrong);
    }
    BackwardOracleInputs given = oracle;
    given.out = out;
    given.lse = lse;
    const OracleGradients exact = oracle_attention_backward(spec, forward == ForwardResults::kGiven ? given : oracle);
    const OracleGradients same_precision = same_precision_attention_backward(inputs.spec(), given);
    for (std::size_t head = 0; head < exact.dsinks.size(); ++head) {
      exact_dsinks[head] += exact.dsinks[head];
      if (forward == ForwardResults::kExact) {
        sink_slack[head] += 2.0 * std::abs(same_precision.dsinks[head] - exact.dsinks[head]);
      }
    }
    const double slack = 0x1p-20 * std::abs(static_cast<double>(spec.softmax_scale)) * largest_norm(oracle.dout) *
                         largest_norm(oracle.v);
    const auto values = [&](const std::vector<std::byte>& packed, std::int64_t begin, std::int64_t row_elements) {
      return packed.data() + static_cast<std::size_t>(begin * row_elements) * size_of(inputs.gradients);
    };
    const std::int64_t k_row = spec.kv_heads * spec.head_dim;
    const std::int64_t v_row = spec.kv_heads * spec.head_dim_v;
    for (const Gradient& gradient :
         {Gradient{"dQ", exact.dq, same_precision.dq,
                   values(result.dq, attention.q_begin(s), std::int64_t{spec.heads} * spec.head_dim), spec.heads,
                   spec.head_dim, slack * largest_norm(oracle.k)},
          Gradient{"dK", exact.dk, same_precision.dk, values(result.dk, attention.k_begin(s), k_row), spec.kv_heads,
                   spec.head_dim, slack * largest_norm(oracle.q)},
          Gradient{"dV", exact.dv, same_precision.dv, values(result.dv, attention.k_begin(s), v_row), spec.kv_heads,
                   spec.head_dim_v, 0.0}}) {
      if (std::string wrong = check(gradient, inputs.gradients); !wrong.empty()) {
        return fmt::format("sequence {}: {}", s, wrong);
      }
    }
  }
  for (std::size_t head = 0; spec.sinks && head < heads; ++head) {
    if (!same_kind(dsinks[head], exact_dsinks[head])) {
      return fmt::format("dsink {} is {}, the oracle has {}", head, dsinks[head], exact_dsinks[head]);
    }
    if (std::isfinite(dsinks[head]) && std::abs(dsinks[head] - exact_dsinks[head]) > sink_slack[head]) {
      return fmt::format("dsink {} is {}, the oracle has {}, allowed {:.3g}", head, dsinks[head], exact_dsinks[head],
                         sink_slack[head]);
    }
  }
  return {};
}

}  // namespace ringattn::testing
