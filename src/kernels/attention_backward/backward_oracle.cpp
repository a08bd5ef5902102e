// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/backward_oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "kernels/attention/oracle.hpp"
#include "kernels/attention/oracle_math.hpp"

namespace ringattn {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kBlockTokens = 64;  // tokens converted at a time

std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }

float round_to(Dtype dtype, float value) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, value);
  return load_element(bytes, dtype);
}

bool sees(const AttentionSpec& spec, std::int64_t position, std::int64_t key) {
  if (spec.mask.left >= 0 && key < position - spec.mask.left) return false;
  return spec.mask.right < 0 || key <= position + spec.mask.right;
}

// Values of one query row in the precision of its pairs.
template <class Real>
struct RowStats {
  Real lse;  // 0 for −∞; fp32: times log2 e
  Real delta;
};

void convert(const OracleRowStats& stats, RowStats<double>& target) {
  target = {stats.lse == -kInfinity ? 0.0 : stats.lse, stats.delta};
}

void convert(const OracleRowStats& stats, RowStats<float>& target) {
  const auto lse = static_cast<float>(stats.lse);
  target = {stats.lse == -kInfinity ? 0.0F : lse * std::numbers::log2e_v<float>, static_cast<float>(stats.delta)};
}

// P and dS of one pair, dS without softmax_scale.
template <class Real>
struct Pair {
  Real p;
  Real ds;
};

// product: q · k. dp: dO · v.
Pair<double> pair_of(const AttentionSpec& spec, double product, double dp, const RowStats<double>& stats) {
  double score = product * static_cast<double>(spec.softmax_scale);
  double slope = 1.0;  // of the softcap
  if (spec.softcap > 0.0F) {
    const double capped = std::tanh(score / static_cast<double>(spec.softcap));
    score = static_cast<double>(spec.softcap) * capped;
    slope = 1.0 - capped * capped;
  }
  const double p = std::exp(score - stats.lse);
  return {p, p * (dp - stats.delta) * slope};
}

// With the kernels' roundings.
Pair<float> pair_of(const AttentionSpec& spec, float product, float dp, const RowStats<float>& stats) {
  float factor = spec.softmax_scale * std::numbers::log2e_v<float>;
  float slope = 1.0F;
  if (spec.softcap > 0.0F) {
    const float capped = std::tanh(product * spec.softmax_scale / spec.softcap);
    product = spec.softcap * capped;
    slope = 1.0F - capped * capped;
    factor = std::numbers::log2e_v<float>;
  }
  const float p = std::exp2(std::fma(product, factor, -stats.lse));
  return {round_to(spec.dtype, p), round_to(spec.dtype, p * (dp - stats.delta) * slope)};
}

// q · k and dO · v of a pair. In fp32 a kernel adds the products one after the other, and so does the reference.
double pair_product(const double* a, const double* b, std::size_t count) { return dot(a, b, count); }
float pair_product(const float* a, const float* b, std::size_t count) {
  float sum = 0.0F;
  for (std::size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

template <class Real>
std::vector<Real> widen_head(const TensorView& view, std::int64_t head) {
  std::vector<Real> rows(index(view.tokens * view.dim));
  for (std::int64_t token = 0; token < view.tokens; ++token) {
    widen_row(view, token, head, rows.data() + token * view.dim);
  }
  return rows;
}

// Copies one head's rows into the dense [tokens, heads, dim] result.
template <class Real>
void place_head(const std::vector<Real>& rows, std::int64_t heads, std::int64_t head, std::int64_t dim, Real scale,
                std::vector<double>& target) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t token = i / index(dim);
    target[(token * index(heads) + index(head)) * index(dim) + i % index(dim)] = static_cast<double>(rows[i] * scale);
  }
}

template <class Real>
OracleGradients gradients_of(const AttentionSpec& spec, const BackwardOracleInputs& inputs,
                             const std::vector<OracleRowStats>& stats) {
  const auto dim = index(spec.head_dim);
  const auto dim_v = index(spec.head_dim_v);
  const int group = spec.heads / spec.kv_heads;
  const auto scale = static_cast<Real>(spec.softmax_scale);
  OracleGradients gradients;
  gradients.dq.resize(index(inputs.q.tokens * spec.heads) * dim);
  gradients.dk.resize(index(inputs.k.tokens * spec.kv_heads) * dim);
  gradients.dv.resize(index(inputs.k.tokens * spec.kv_heads) * dim_v);
  for (int kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
    const std::vector<Real> k = widen_head<Real>(inputs.k, kv_head);
    const std::vector<Real> v = widen_head<Real>(inputs.v, kv_head);
    std::vector<Real> dk(k.size());
    std::vector<Real> dv(v.size());
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const std::vector<Real> q = widen_head<Real>(inputs.q, head);
      const std::vector<Real> dout = widen_head<Real>(inputs.dout, head);
      std::vector<Real> dq(q.size());
      for (std::int64_t token = 0; token < inputs.q.tokens; ++token) {
        const Real* const q_row = q.data() + index(token) * dim;
        const Real* const dout_row = dout.data() + index(token) * dim_v;
        RowStats<Real> row;
        convert(stats[index(token * spec.heads + head)], row);
        for (std::int64_t key = 0; key < inputs.k.tokens; ++key) {
          if (!sees(spec, inputs.q_offset + token, key)) continue;
          const Real* const k_row = k.data() + index(key) * dim;
          const Real* const v_row = v.data() + index(key) * dim_v;
          const Pair<Real> pair =
              pair_of(spec, pair_product(q_row, k_row, dim), pair_product(dout_row, v_row, dim_v), row);
          add_scaled(pair.ds, k_row, dim, dq.data() + index(token) * dim);
          add_scaled(pair.ds, q_row, dim, dk.data() + index(key) * dim);
          add_scaled(pair.p, dout_row, dim_v, dv.data() + index(key) * dim_v);
        }
      }
      place_head(dq, spec.heads, head, spec.head_dim, scale, gradients.dq);
    }
    place_head(dk, spec.kv_heads, kv_head, spec.head_dim, scale, gradients.dk);
    place_head(dv, spec.kv_heads, kv_head, spec.head_dim_v, Real{1}, gradients.dv);
  }
  if (spec.sinks) {
    gradients.dsinks.resize(index(spec.heads));
    for (std::size_t row = 0; row < stats.size(); ++row) {
      if (stats[row].lse == -kInfinity) continue;
      const std::size_t head = row % index(spec.heads);
      const auto weight =
          static_cast<double>(std::exp(static_cast<Real>(inputs.sinks[head]) - static_cast<Real>(stats[row].lse)));
      gradients.dsinks[head] -= weight * stats[row].delta;
    }
  }
  return gradients;
}

// O and LSE of the forward in fp64.
void forward(const AttentionSpec& spec, const BackwardOracleInputs& inputs, std::vector<double>& out,
             std::vector<double>& lse) {
  oracle_attention(spec, inputs.q, inputs.k, inputs.v, inputs.q_offset, inputs.sinks, out, lse);
}

float dlse_of(const RowView& dlse, std::int64_t token, std::int64_t head) {
  return dlse.data == nullptr ? 0.0F : dlse.at(token, head);
}

}  // namespace

std::vector<OracleRowStats> oracle_row_stats(const TensorView& out, const RowView& lse, const TensorView& dout,
                                             const RowView& dlse) {
  std::vector<OracleRowStats> stats;
  std::vector<double> out_row(index(out.dim));
  std::vector<double> dout_row(index(out.dim));
  for (std::int64_t token = 0; token < out.tokens; ++token) {
    for (std::int64_t head = 0; head < out.heads; ++head) {
      widen_row(out, token, head, out_row.data());
      widen_row(dout, token, head, dout_row.data());
      stats.push_back({static_cast<double>(lse.at(token, head)), dot(out_row.data(), dout_row.data(), out_row.size()) -
                                                                     static_cast<double>(dlse_of(dlse, token, head))});
    }
  }
  return stats;
}

OracleDqRow::OracleDqRow(const AttentionSpec& spec, int head, std::int64_t position, std::int64_t key_length,
                         std::vector<double> q, std::vector<double> dout, const OracleRowStats& stats)
    : spec_(spec),
      head_(head),
      position_(position),
      key_length_(key_length),
      q_(std::move(q)),
      dout_(std::move(dout)),
      stats_(stats),
      sum_(q_.size(), 0.0) {}

void OracleDqRow::feed(std::int64_t first_key, const TensorView& k, const TensorView& v) {
  feed_rows({this, 1}, first_key, k, v);
}

std::vector<double> OracleDqRow::finish() const {
  std::vector<double> dq = sum_;
  for (double& value : dq) value *= static_cast<double>(spec_.softmax_scale);
  return dq;
}

void feed_rows(std::span<OracleDqRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v) {
  if (rows.empty()) return;
  const AttentionSpec& spec = rows[0].spec_;
  const auto dim = index(spec.head_dim);
  const auto dim_v = index(spec.head_dim_v);
  std::vector<double> wide_k(index(kBlockTokens) * dim);
  std::vector<double> wide_v(index(kBlockTokens) * dim_v);
  for (std::int64_t begin = 0; begin < k.tokens; begin += kBlockTokens) {
    const std::int64_t count = std::min(kBlockTokens, k.tokens - begin);
    for (int kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
      bool converted = false;
      for (OracleDqRow& row : rows) {
        if (row.head_ / (spec.heads / spec.kv_heads) != kv_head) continue;
        RowStats<double> stats;
        convert(row.stats_, stats);
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t key = first_key + begin + i;
          if (key >= row.key_length_ || !sees(spec, row.position_, key)) continue;
          if (!converted) {
            for (std::int64_t j = 0; j < count; ++j) {
              widen_row(k, begin + j, kv_head, wide_k.data() + index(j) * dim);
              widen_row(v, begin + j, kv_head, wide_v.data() + index(j) * dim_v);
            }
            converted = true;
          }
          const double* const k_row = wide_k.data() + index(i) * dim;
          const double* const v_row = wide_v.data() + index(i) * dim_v;
          const double product = dot(row.q_.data(), k_row, dim);
          const double dp = dot(row.dout_.data(), v_row, dim_v);
          add_scaled(pair_of(spec, product, dp, stats).ds, k_row, dim, row.sum_.data());
        }
      }
    }
  }
}

OracleDkvRow::OracleDkvRow(const AttentionSpec& spec, int kv_head, std::int64_t key, std::vector<double> k,
                           std::vector<double> v)
    : spec_(spec),
      kv_head_(kv_head),
      key_(key),
      k_(std::move(k)),
      v_(std::move(v)),
      dk_sum_(k_.size(), 0.0),
      dv_(v_.size(), 0.0) {}

void OracleDkvRow::feed(std::int64_t first_position, const TensorView& q, const TensorView& dout,
                        std::span<const OracleRowStats> stats) {
  feed_rows({this, 1}, first_position, q, dout, stats);
}

void OracleDkvRow::finish(std::vector<double>& dk, std::vector<double>& dv) const {
  dk = dk_sum_;
  for (double& value : dk) value *= static_cast<double>(spec_.softmax_scale);
  dv = dv_;
}

void feed_rows(std::span<OracleDkvRow> rows, std::int64_t first_position, const TensorView& q, const TensorView& dout,
               std::span<const OracleRowStats> stats) {
  if (rows.empty()) return;
  const AttentionSpec& spec = rows[0].spec_;
  const auto dim = index(spec.head_dim);
  const auto dim_v = index(spec.head_dim_v);
  const int group = spec.heads / spec.kv_heads;
  std::vector<double> wide_q(index(kBlockTokens) * dim);
  std::vector<double> wide_dout(index(kBlockTokens) * dim_v);
  for (std::int64_t begin = 0; begin < q.tokens; begin += kBlockTokens) {
    const std::int64_t count = std::min(kBlockTokens, q.tokens - begin);
    for (int head = 0; head < spec.heads; ++head) {
      bool converted = false;
      for (OracleDkvRow& row : rows) {
        if (row.kv_head_ != head / group) continue;
        for (std::int64_t i = 0; i < count; ++i) {
          if (!sees(spec, first_position + begin + i, row.key_)) continue;
          if (!converted) {
            for (std::int64_t j = 0; j < count; ++j) {
              widen_row(q, begin + j, head, wide_q.data() + index(j) * dim);
              widen_row(dout, begin + j, head, wide_dout.data() + index(j) * dim_v);
            }
            converted = true;
          }
          const double* const q_row = wide_q.data() + index(i) * dim;
          const double* const dout_row = wide_dout.data() + index(i) * dim_v;
          RowStats<double> query;
          convert(stats[index((begin + i) * spec.heads + head)], query);
          const double product = dot(q_row, row.k_.data(), dim);
          const Pair<double> pair = pair_of(spec, product, dot(dout_row, row.v_.data(), dim_v), query);
          add_scaled(pair.ds, q_row, dim, row.dk_sum_.data());
          add_scaled(pair.p, dout_row, dim_v, row.dv_.data());
        }
      }
    }
  }
}

OracleGradients oracle_attention_backward(const AttentionSpec& spec, const BackwardOracleInputs& inputs) {
  if (inputs.out.data != nullptr) {
    return gradients_of<double>(spec, inputs, oracle_row_stats(inputs.out, inputs.lse, inputs.dout, inputs.dlse));
  }
  std::vector<double> out;
  std::vector<double> lse;
  forward(spec, inputs, out, lse);
  std::vector<OracleRowStats> stats;
  std::vector<double> dout(index(spec.head_dim_v));
  for (std::size_t row = 0; row < lse.size(); ++row) {
    const auto token = static_cast<std::int64_t>(row) / spec.heads;
    const auto head = static_cast<std::int64_t>(row) % spec.heads;
    widen_row(inputs.dout, token, head, dout.data());
    stats.push_back({lse[row], dot(out.data() + row * dout.size(), dout.data(), dout.size()) -
                                   static_cast<double>(dlse_of(inputs.dlse, token, head))});
  }
  return gradients_of<double>(spec, inputs, stats);
}

OracleGradients same_precision_attention_backward(const AttentionBackwardSpec& spec,
                                                  const BackwardOracleInputs& inputs) {
  const AttentionSpec& attention = spec.forward;
  std::vector<double> wide_out;
  std::vector<double> wide_lse;
  if (inputs.out.data == nullptr) forward(attention, inputs, wide_out, wide_lse);
  std::vector<OracleRowStats> stats;
  std::vector<float> out(index(attention.head_dim_v));
  std::vector<float> dout(index(attention.head_dim_v));
  for (std::int64_t token = 0; token < inputs.q.tokens; ++token) {
    for (int head = 0; head < attention.heads; ++head) {
      const std::size_t row = index(token * attention.heads + head);
      double lse = 0.0;
      if (inputs.out.data == nullptr) {
        for (std::size_t i = 0; i < out.size(); ++i) {
          out[i] = round_to(attention.dtype, static_cast<float>(wide_out[row * out.size() + i]));
        }
        lse = wide_lse[row];
      } else {
        widen_row(inputs.out, token, head, out.data());
        lse = static_cast<double>(inputs.lse.at(token, head));
      }
      widen_row(inputs.dout, token, head, dout.data());
      const float delta = dot(out.data(), dout.data(), out.size()) - dlse_of(inputs.dlse, token, head);
      stats.push_back({lse, static_cast<double>(delta)});
    }
  }
  OracleGradients gradients = gradients_of<float>(attention, inputs, stats);
  for (std::vector<double>* rows : {&gradients.dq, &gradients.dk, &gradients.dv}) {
    for (double& value : *rows) value = static_cast<double>(round_to(spec.gradients, static_cast<float>(value)));
  }
  return gradients;
}

}  // namespace ringattn
