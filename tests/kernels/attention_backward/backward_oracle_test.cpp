// SPDX-License-Identifier: Apache-2.0
// The oracle of the gradients against finite differences of the forward's oracle, and its row-sampled form against the
// whole sequence.
#include "kernels/attention_backward/backward_oracle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "kernels/attention/oracle.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

// One sequence in fp32, with the gradients of its outputs.
struct Problem {
  AttentionSpec spec;
  SequenceShape shape;
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> dout;
  std::vector<float> dlse;
  std::vector<float> sinks;

  TensorView q_view() const { return dense_view(q.data(), Dtype::kF32, shape.q_len, spec.heads, spec.head_dim); }
  TensorView k_view() const { return dense_view(k.data(), Dtype::kF32, shape.k_len, spec.kv_heads, spec.head_dim); }
  TensorView v_view() const { return dense_view(v.data(), Dtype::kF32, shape.k_len, spec.kv_heads, spec.head_dim_v); }
  TensorView dout_view() const {
    return dense_view(dout.data(), Dtype::kF32, shape.q_len, spec.heads, spec.head_dim_v);
  }
  BackwardOracleInputs inputs() {
    return {q_view(),
            k_view(),
            v_view(),
            dout_view(),
            {dlse.data(), spec.heads, 1},
            shape.q_offset,
            spec.sinks ? sinks.data() : nullptr};
  }
};

// Multiples of 2⁻¹², to which steps of a difference are added exactly.
std::vector<float> lattice_values(std::int64_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(std::round(normal(random) * 4096.0F) / 4096.0F);
  return values;
}

Problem random_problem(const AttentionSpec& spec, const SequenceShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Problem problem{spec, shape, {}, {}, {}, {}, {}, {}};
  problem.q = lattice_values(shape.q_len * spec.heads * spec.head_dim, random);
  problem.k = lattice_values(shape.k_len * spec.kv_heads * spec.head_dim, random);
  problem.v = lattice_values(shape.k_len * spec.kv_heads * spec.head_dim_v, random);
  problem.dout = lattice_values(shape.q_len * spec.heads * spec.head_dim_v, random);
  problem.dlse = lattice_values(shape.q_len * spec.heads, random);
  problem.sinks = lattice_values(spec.heads, random);
  return problem;
}

// Σ dO ∘ O + Σ dLSE ∘ LSE. An LSE of −∞ is a constant.
double loss(const Problem& problem) {
  std::vector<double> out;
  std::vector<double> lse;
  oracle_attention(problem.spec, problem.q_view(), problem.k_view(), problem.v_view(), problem.shape.q_offset,
                   problem.spec.sinks ? problem.sinks.data() : nullptr, out, lse);
  double sum = 0.0;
  for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * static_cast<double>(problem.dout[i]);
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (lse[i] > -kInfinity) sum += lse[i] * static_cast<double>(problem.dlse[i]);
  }
  return sum;
}

// The gradient of loss() for each of `values`, which are the problem's, by central differences of fourth order.
std::vector<double> differences(const Problem& problem, std::vector<float>& values) {
  constexpr float kStep = 0x1p-9F;
  std::vector<double> gradient;
  for (float& value : values) {
    const float center = value;
    const auto at = [&](float steps) {
      value = center + steps * kStep;
      return loss(problem);
    };
    gradient.push_back((8.0 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12.0 * static_cast<double>(kStep)));
    value = center;
  }
  return gradient;
}

// Each element within 1e-6 of its own size, or of a thousandth of the largest one.
void expect_near(const std::vector<double>& values, const std::vector<double>& expected, const char* name) {
  ASSERT_EQ(values.size(), expected.size()) << name;
  double largest = 0.0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], 1e-6 * std::max(std::abs(expected[i]), 1e-3 * largest)) << name << ' ' << i;
  }
}

struct Heads {
  int heads;
  int kv_heads;
};

TEST(BackwardOracle, IsTheDerivative) {
  std::uint64_t seed = 300;
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{0, 0}, Mask{3, 0}, Mask{4, 2}, Mask{-1, 3}, Mask{2, -1}}) {
    for (const Heads heads : {Heads{2, 2}, Heads{6, 2}, Heads{5, 1}}) {
      for (const bool extras : {false, true}) {
        for (const SequenceShape& shape : {SequenceShape{7, 11, 3}, SequenceShape{9, 6, -5}, SequenceShape{1, 1, 0}}) {
          AttentionSpec spec = make_spec(Dtype::kF32, heads.heads, heads.kv_heads, 5, mask, 3);
          spec.sinks = extras;
          spec.softcap = extras ? 2.0F : 0.0F;
          Problem problem = random_problem(spec, shape, ++seed);
          SCOPED_TRACE(describe(spec) + ", offset " + std::to_string(shape.q_offset));
          const OracleGradients gradients = oracle_attention_backward(spec, problem.inputs());
          expect_near(gradients.dq, differences(problem, problem.q), "dq");
          expect_near(gradients.dk, differences(problem, problem.k), "dk");
          expect_near(gradients.dv, differences(problem, problem.v), "dv");
          if (extras) expect_near(gradients.dsinks, differences(problem, problem.sinks), "dsinks");
        }
      }
    }
  }
}

TEST(BackwardOracle, SinkOfRowsWithoutKeysGetsTheirDlse) {
  AttentionSpec spec = make_spec(Dtype::kF32, 2, 1, 4, {-1, 0});
  spec.sinks = true;
  Problem problem = random_problem(spec, {3, 5, -10}, 41);
  const OracleGradients gradients = oracle_attention_backward(spec, problem.inputs());
  for (std::size_t head = 0; head < 2; ++head) {
    EXPECT_NEAR(gradients.dsinks[head],
                static_cast<double>(problem.dlse[head]) + static_cast<double>(problem.dlse[2 + head]) +
                    static_cast<double>(problem.dlse[4 + head]),
                1e-12);
  }
  for (const std::vector<double>* rows : {&gradients.dq, &gradients.dk, &gradients.dv}) {
    for (const double value : *rows) EXPECT_EQ(value, 0.0);
  }
  problem.spec.sinks = false;
  EXPECT_TRUE(oracle_attention_backward(problem.spec, problem.inputs()).dsinks.empty());
}

// With the forward's results given, P and delta follow them: P is e times as large where LSE is smaller by 1.
TEST(BackwardOracle, FollowsTheResultsThatAreGiven) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 4, 2, 6, {-1, 0});
  Problem problem = random_problem(spec, {9, 12, 3}, 42);
  BackwardOracleInputs inputs = problem.inputs();
  const OracleGradients exact = oracle_attention_backward(spec, inputs);
  std::vector<double> out;
  std::vector<double> lse;
  oracle_attention(spec, inputs.q, inputs.k, inputs.v, 3, nullptr, out, lse);
  std::vector<float> given_out(out.begin(), out.end());
  std::vector<float> given_lse(lse.begin(), lse.end());
  inputs.out = dense_view(given_out.data(), Dtype::kF32, 9, 4, 6);
  inputs.lse = {given_lse.data(), 4, 1};
  const OracleGradients given = oracle_attention_backward(spec, inputs);
  for (std::size_t i = 0; i < exact.dq.size(); ++i) EXPECT_NEAR(given.dq[i], exact.dq[i], 1e-5);
  for (std::size_t i = 0; i < exact.dk.size(); ++i) EXPECT_NEAR(given.dk[i], exact.dk[i], 1e-5);
  for (float& value : given_lse) value -= 1.0F;
  const OracleGradients shifted = oracle_attention_backward(spec, inputs);
  for (std::size_t i = 0; i < exact.dv.size(); ++i) EXPECT_NEAR(shifted.dv[i], std::exp(1.0) * given.dv[i], 1e-5);
}

std::vector<double> row_of(const TensorView& view, std::int64_t token, std::int64_t head) {
  std::vector<double> row;
  for (std::int64_t i = 0; i < view.dim; ++i) {
    row.push_back(static_cast<double>(
        load_element(view.at(token, head) + static_cast<std::size_t>(i) * size_of(view.dtype), view.dtype)));
  }
  return row;
}

TensorView part(TensorView view, std::int64_t begin, std::int64_t tokens) {
  view.data = view.at(begin, 0);
  view.tokens = tokens;
  return view;
}

// Rows in batches or alone, in pieces of any size, give the whole sequence's gradients.
TEST(BackwardOracle, SampledRowsAreThoseOfTheSequence) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{40, 7}}) {
    AttentionSpec spec = make_spec(Dtype::kF32, 6, 2, 16, mask, 8);
    spec.softcap = 3.0F;
    const SequenceShape shape{150, 200, -7};
    Problem problem = random_problem(spec, shape, 43);
    BackwardOracleInputs inputs = problem.inputs();
    std::vector<double> out;
    std::vector<double> lse;
    oracle_attention(spec, inputs.q, inputs.k, inputs.v, shape.q_offset, nullptr, out, lse);
    const std::vector<float> given_out(out.begin(), out.end());
    std::vector<float> given_lse(lse.begin(), lse.end());
    inputs.out = dense_view(given_out.data(), Dtype::kF32, shape.q_len, 6, 8);
    inputs.lse = {given_lse.data(), 6, 1};
    const OracleGradients whole = oracle_attention_backward(spec, inputs);
    const std::vector<OracleRowStats> stats = oracle_row_stats(inputs.out, inputs.lse, inputs.dout, inputs.dlse);
    const auto near = [](const std::vector<double>& row, const std::vector<double>& all, std::int64_t at) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        EXPECT_NEAR(row[i], all[static_cast<std::size_t>(at) * row.size() + i], 1e-12);
      }
    };

    const auto queries = [&] {
      std::vector<OracleDqRow> rows;
      for (std::int64_t row = 0; row < shape.q_len * 6; row += 7) {
        rows.emplace_back(spec, static_cast<int>(row % 6), shape.q_offset + row / 6, shape.k_len,
                          row_of(inputs.q, row / 6, row % 6), row_of(inputs.dout, row / 6, row % 6),
                          stats[static_cast<std::size_t>(row)]);
      }
      return rows;
    };
    std::vector<OracleDqRow> together = queries();
    feed_rows(together, 0, inputs.k, inputs.v);
    std::vector<OracleDqRow> pieces = queries();
    for (std::int64_t begin = 0, size = 1; begin < shape.k_len; begin += size, size = size * 3 + 1) {
      size = std::min(size, shape.k_len - begin);
      for (OracleDqRow& row : pieces) row.feed(begin, part(inputs.k, begin, size), part(inputs.v, begin, size));
    }
    for (std::size_t i = 0; i < together.size(); ++i) {
      EXPECT_EQ(together[i].finish(), pieces[i].finish());
      near(together[i].finish(), whole.dq, static_cast<std::int64_t>(i) * 7);
    }

    const auto keys = [&] {
      std::vector<OracleDkvRow> rows;
      for (std::int64_t row = 0; row < shape.k_len * 2; row += 5) {
        rows.emplace_back(spec, static_cast<int>(row % 2), row / 2, row_of(inputs.k, row / 2, row % 2),
                          row_of(inputs.v, row / 2, row % 2));
      }
      return rows;
    };
    std::vector<OracleDkvRow> all_keys = keys();
    feed_rows(all_keys, shape.q_offset, inputs.q, inputs.dout, stats);
    std::vector<OracleDkvRow> key_pieces = keys();
    // A sum's order is by blocks of queries, which pieces of 64 keep.
    for (std::int64_t begin = 0; begin < shape.q_len; begin += 64) {
      const std::int64_t size = std::min<std::int64_t>(64, shape.q_len - begin);
      for (OracleDkvRow& row : key_pieces) {
        row.feed(shape.q_offset + begin, part(inputs.q, begin, size), part(inputs.dout, begin, size),
                 std::span(stats).subspan(static_cast<std::size_t>(begin * 6), static_cast<std::size_t>(size * 6)));
      }
    }
    std::vector<double> dk;
    std::vector<double> dv;
    std::vector<double> dk_of_pieces;
    std::vector<double> dv_of_pieces;
    for (std::size_t i = 0; i < all_keys.size(); ++i) {
      all_keys[i].finish(dk, dv);
      key_pieces[i].finish(dk_of_pieces, dv_of_pieces);
      EXPECT_EQ(dk, dk_of_pieces);
      EXPECT_EQ(dv, dv_of_pieces);
      near(dk, whole.dk, static_cast<std::int64_t>(i) * 5);
      near(dv, whole.dv, static_cast<std::int64_t>(i) * 5);
    }
  }
}

// Excluded pairs are never read, and a row whose every score is −∞ has no weight.
TEST(BackwardOracle, NonFiniteValuesDoNotCrossTheMask) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 1, 1, 2, {-1, 0});
  Problem problem = random_problem(spec, {4, 4, 0}, 44);
  const OracleGradients clean = oracle_attention_backward(spec, problem.inputs());
  problem.v[6] = std::numeric_limits<float>::quiet_NaN();  // of the last key, which only the last query sees
  const OracleGradients planted = oracle_attention_backward(spec, problem.inputs());
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(planted.dq[i], clean.dq[i]);
  EXPECT_TRUE(std::isnan(planted.dq[6]));

  problem = random_problem(spec, {1, 2, 1}, 45);
  problem.q = {1.0F, 1.0F};
  problem.k = {-std::numeric_limits<float>::infinity(), 0.0F, -std::numeric_limits<float>::infinity(), 0.0F};
  const OracleGradients none = oracle_attention_backward(spec, problem.inputs());
  for (const double value : none.dk) EXPECT_EQ(value, 0.0);
  for (const double value : none.dv) EXPECT_EQ(value, 0.0);
}

// Its error is that of the dtype, and it is exact where no rounding happens.
TEST(BackwardOracle, SamePrecisionReferenceRoundsToTheDtype) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    AttentionSpec spec = make_spec(dtype, 4, 2, 16, {-1, 0});
    spec.sinks = true;
    const AttentionInputs inputs = random_inputs(spec, {{60, 70, 10}}, 46);
    const AttentionInputs gradients = random_inputs(spec, {{60, 70, 10}}, 47);
    const BackwardOracleInputs oracle_inputs{
        inputs.q_view(0), inputs.k_view(0), inputs.v_view(0), gradients.q_view(0), {}, 10, inputs.sinks.data()};
    const OracleGradients exact = oracle_attention_backward(spec, oracle_inputs);
    const OracleGradients rounded = same_precision_attention_backward({spec, dtype}, oracle_inputs);
    const double unit = dtype == Dtype::kF32 ? 0x1p-24 : dtype == Dtype::kBf16 ? 0x1p-9 : 0x1p-12;
    double error = 0.0;
    for (std::size_t i = 0; i < exact.dk.size(); ++i) {
      error = std::max(error, std::abs(rounded.dk[i] - exact.dk[i]));
      std::byte bytes[sizeof(float)];
      store_element(bytes, dtype, static_cast<float>(rounded.dk[i]));
      EXPECT_EQ(static_cast<double>(load_element(bytes, dtype)), rounded.dk[i]);
    }
    EXPECT_GT(error, 0.1 * unit);
    EXPECT_LT(error, 100.0 * unit);
    for (std::size_t i = 0; i < exact.dsinks.size(); ++i) {
      EXPECT_NEAR(rounded.dsinks[i], exact.dsinks[i], 100.0 * unit);
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
