// SPDX-License-Identifier: Apache-2.0
// The oracle against the definition in long double, two passes and no streaming; and against itself, fed in pieces.
#include "kernels/attention/oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/attention_inputs.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

constexpr double kTolerance = 1e-12;  // relative to values of about 1

double element(const TensorView& view, std::int64_t token, std::int64_t head, std::int64_t i) {
  return static_cast<double>(
      load_element(view.at(token, head) + static_cast<std::size_t>(i) * size_of(view.dtype), view.dtype));
}

// exp(lse − …)-free definition: weights of one row, softmax over what it sees and the sink.
void expect_definition(const AttentionInputs& inputs, std::int64_t token, int head, const double* out, double lse) {
  const AttentionSpec& spec = inputs.spec;
  const int kv_head = head * spec.kv_heads / spec.heads;
  const TensorView q = inputs.q_view(0);
  const TensorView k = inputs.k_view(0);
  const TensorView v = inputs.v_view(0);
  const std::int64_t position = token + inputs.sequences[0].q_offset;
  long double sum =
      spec.sinks ? std::exp(static_cast<long double>(inputs.sinks[static_cast<std::size_t>(head)])) : 0.0L;
  std::vector<long double> o(static_cast<std::size_t>(spec.head_dim_v), 0.0L);
  for (std::int64_t key = 0; key < k.tokens; ++key) {
    const bool before = spec.mask.left >= 0 && position - key > spec.mask.left;
    const bool behind = spec.mask.right >= 0 && key - position > spec.mask.right;
    if (before || behind) continue;
    long double score = 0.0L;
    for (int i = 0; i < spec.head_dim; ++i) {
      score += static_cast<long double>(element(q, token, head, i)) * element(k, key, kv_head, i);
    }
    score *= spec.softmax_scale;
    if (spec.softcap > 0.0F) score = spec.softcap * std::tanh(score / spec.softcap);
    const long double weight = std::exp(score);
    sum += weight;
    for (int i = 0; i < spec.head_dim_v; ++i) o[static_cast<std::size_t>(i)] += weight * element(v, key, kv_head, i);
  }
  if (sum == 0.0L) {
    EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
  } else {
    EXPECT_NEAR(lse, static_cast<double>(std::log(sum)), kTolerance);
  }
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_NEAR(out[i], sum == 0.0L ? 0.0 : static_cast<double>(o[i] / sum), kTolerance);
  }
}

TEST(Oracle, IsTheDefinition) {
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{0, 0}, Mask{5, -1}, Mask{-1, 3}, Mask{4, 2}}) {
    for (const bool extras : {false, true}) {
      AttentionSpec spec = make_spec(Dtype::kF16, 6, 2, 20, mask);
      spec.head_dim_v = 12;
      spec.sinks = extras;
      spec.softcap = extras ? 2.0F : 0.0F;
      const AttentionInputs inputs = random_inputs(spec, {{30, 70, -5}}, 91);
      std::vector<double> out;
      std::vector<double> lse;
      oracle_attention(spec, inputs.q_view(0), inputs.k_view(0), inputs.v_view(0), -5,
                       extras ? inputs.sinks.data() : nullptr, out, lse);
      ASSERT_EQ(out.size(), 30U * 6 * 12);
      for (std::int64_t row = 0; row < 30 * 6; ++row) {
        expect_definition(inputs, row / 6, static_cast<int>(row % 6), out.data() + row * 12,
                          lse[static_cast<std::size_t>(row)]);
      }
    }
  }
}

// Pieces of any size, for one row or for many, give the same numbers.
TEST(Oracle, PiecesMakeNoDifference) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 16, {40, 0});
  const AttentionInputs inputs = random_inputs(spec, {{1, 300, 250}}, 92);
  const TensorView k = inputs.k_view(0);
  const TensorView v = inputs.v_view(0);
  const auto part = [](const TensorView& view, std::int64_t begin, std::int64_t tokens) {
    TensorView piece = view;
    piece.data = view.at(begin, 0);
    piece.tokens = tokens;
    return piece;
  };
  const auto rows = [&] {
    std::vector<OracleRow> made;
    for (int head = 0; head < 4; ++head) {
      for (const std::int64_t position : {0, 150, 299, 320}) {
        std::vector<double> q;
        for (int i = 0; i < 16; ++i) q.push_back(element(inputs.q_view(0), 0, head, i));
        made.emplace_back(spec, head, position, 300, q);
      }
    }
    return made;
  };
  std::vector<OracleRow> together = rows();
  feed_rows(together, 0, k, v);
  std::vector<OracleRow> pieces = rows();
  for (std::int64_t begin = 0, size = 1; begin < 300; begin += size, size = size * 3 + 1) {
    size = std::min(size, 300 - begin);
    for (OracleRow& row : pieces) row.feed(begin, part(k, begin, size), part(v, begin, size));
  }
  std::vector<double> expected;
  std::vector<double> out;
  for (std::size_t i = 0; i < together.size(); ++i) {
    EXPECT_EQ(together[i].finish(0.0, expected), pieces[i].finish(0.0, out));
    EXPECT_EQ(expected, out);
  }
}

TEST(Oracle, NonFiniteScores) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 1, 1, 1, {-1, -1});
  const auto lse_of = [&](std::vector<float> keys, std::vector<float> values, std::vector<double>& out) {
    OracleRow row(spec, 0, 0, static_cast<std::int64_t>(keys.size()), {1.0});
    const auto tokens = static_cast<std::int64_t>(keys.size());
    row.feed(0, dense_view(keys.data(), Dtype::kF32, tokens, 1, 1),
             dense_view(values.data(), Dtype::kF32, tokens, 1, 1));
    return row.finish(0.0, out);
  };
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<double> out;
  EXPECT_EQ(lse_of({-infinity, -infinity}, {1, 2}, out), -kInfinity);  // nothing to weigh
  EXPECT_EQ(out[0], 0.0);
  EXPECT_EQ(lse_of({-infinity, 0}, {7, 2}, out), 0.0);
  EXPECT_EQ(out[0], 2.0);
  EXPECT_TRUE(std::isnan(lse_of({0, infinity}, {1, 2}, out)));  // exp(∞ − ∞)
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_TRUE(std::isnan(lse_of({std::nanf(""), 5}, {1, 2}, out)));
  EXPECT_TRUE(std::isnan(out[0]));
  lse_of({0, 2000}, {infinity, 1}, out);  // a weight below the least double, not of zero
  EXPECT_EQ(out[0], kInfinity);
}

}  // namespace
}  // namespace ringattn::testing
