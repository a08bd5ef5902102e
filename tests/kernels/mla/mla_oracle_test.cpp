// SPDX-License-Identifier: Apache-2.0
// The oracle of latent attention against the formula as it is written: keys and values of every head, all in fp64.
#include "kernels/mla/mla_oracle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

struct MlaInputs {
  MlaSpec spec;
  std::int64_t rows;
  std::int64_t keys;
  std::int64_t offset;
  Dtype other;  // of the matrices: the oracle takes any
  std::vector<std::byte> q, latent, k_rope, w_uk, w_uv;
  std::vector<float> sinks;

  TensorView q_view() const {
    return dense_view(q.data(), spec.dtype, rows, spec.heads, spec.head_dim + spec.rope_dim);
  }
  TensorView latent_view() const { return dense_view(latent.data(), spec.dtype, keys, 1, spec.latent_dim); }
  TensorView rope_view() const { return dense_view(k_rope.data(), spec.dtype, keys, 1, spec.rope_dim); }
  // They lie the other way round, as a loader may have them.
  GemmWeights w_uk_matrices() const {
    return {w_uk.data(), other,        spec.heads, spec.head_dim, spec.latent_dim, spec.head_dim * spec.latent_dim,
            1,           spec.head_dim};
  }
  GemmWeights w_uv_matrices() const {
    return {w_uv.data(),     other, spec.heads, spec.head_dim_v, spec.latent_dim, spec.head_dim_v * spec.latent_dim,
            spec.latent_dim, 1};
  }
};

double element(const void* data, Dtype dtype, std::int64_t index) {
  return load_element(static_cast<const std::byte*>(data) + static_cast<std::size_t>(index) * size_of(dtype), dtype);
}

MlaInputs random_mla_tensors(const MlaSpec& spec, std::int64_t rows, std::int64_t keys, std::int64_t offset,
                             Dtype other) {
  MlaInputs inputs{spec, rows, keys, offset, other, {}, {}, {}, {}, {}, {}};
  std::mt19937_64 generator(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<std::byte>& to, std::int64_t count, Dtype dtype, float scale) {
    to.resize(static_cast<std::size_t>(count) * size_of(dtype));
    for (std::size_t at = 0; at < to.size(); at += size_of(dtype)) {
      store_element(to.data() + at, dtype, normal(generator) * scale);
    }
  };
  const float scale = 1.0F / std::sqrt(static_cast<float>(spec.latent_dim));
  fill(inputs.q, rows * spec.heads * (spec.head_dim + spec.rope_dim), spec.dtype, 1.0F);
  fill(inputs.latent, keys * spec.latent_dim, spec.dtype, 1.0F);
  fill(inputs.k_rope, keys * spec.rope_dim, spec.dtype, 1.0F);
  fill(inputs.w_uk, std::int64_t{spec.heads} * spec.head_dim * spec.latent_dim, other, scale);
  fill(inputs.w_uv, std::int64_t{spec.heads} * spec.head_dim_v * spec.latent_dim, other, scale);
  if (spec.sinks) {
    for (int head = 0; head < spec.heads; ++head) inputs.sinks.push_back(normal(generator));
  }
  return inputs;
}

// Σ_i matrix[head, o, i] · latent[key, i].
double expanded(const GemmWeights& matrices, const TensorView& latent, int head, std::int64_t o, std::int64_t key) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < matrices.dim_k; ++i) {
    sum += element(matrices.at(head), matrices.dtype, o * matrices.n_stride + i * matrices.k_stride) *
           element(latent.at(key, 0), latent.dtype, i);
  }
  return sum;
}

// By the formula. Returns LSE.
double written_out(const MlaInputs& inputs, std::int64_t row, int head, std::vector<double>& out) {
  const MlaSpec& spec = inputs.spec;
  const std::int64_t position = inputs.offset + row;
  std::vector<double> scores(static_cast<std::size_t>(inputs.keys), -kInfinity);
  double max = spec.sinks ? inputs.sinks[static_cast<std::size_t>(head)] : -kInfinity;
  const auto q = [&](std::int64_t i) { return element(inputs.q_view().at(row, head), spec.dtype, i); };
  for (std::int64_t key = 0; key < inputs.keys; ++key) {
    if (spec.mask.left >= 0 && key < position - spec.mask.left) continue;
    if (spec.mask.right >= 0 && key > position + spec.mask.right) continue;
    double score = 0.0;
    for (int i = 0; i < spec.head_dim; ++i) {
      score += q(i) * expanded(inputs.w_uk_matrices(), inputs.latent_view(), head, i, key);
    }
    for (int i = 0; i < spec.rope_dim; ++i) {
      score += q(spec.head_dim + i) * element(inputs.rope_view().at(key, 0), spec.dtype, i);
    }
    score *= static_cast<double>(spec.softmax_scale);
    const auto cap = static_cast<double>(spec.softcap);
    if (cap > 0.0) score = cap * std::tanh(score / cap);
    scores[static_cast<std::size_t>(key)] = score;
    max = std::max(max, score);
  }
  out.assign(static_cast<std::size_t>(spec.head_dim_v), 0.0);
  if (max == -kInfinity) return -kInfinity;
  double sum = spec.sinks ? std::exp(inputs.sinks[static_cast<std::size_t>(head)] - max) : 0.0;
  for (std::int64_t key = 0; key < inputs.keys; ++key) {
    const double p = std::exp(scores[static_cast<std::size_t>(key)] - max);
    sum += p;
    if (p == 0.0) continue;
    for (int o = 0; o < spec.head_dim_v; ++o) {
      out[static_cast<std::size_t>(o)] += p * expanded(inputs.w_uv_matrices(), inputs.latent_view(), head, o, key);
    }
  }
  for (double& o : out) o /= sum;
  return max + std::log(sum);
}

MlaSpec small_spec(Dtype dtype, const Mask& mask) {
  MlaSpec spec{dtype, 3, 24, 8, 16, 40, mask};
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

TEST(MlaOracle, IsTheFormula) {
  int compared = 0;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{5, 2}}) {
      for (const bool more : {false, true}) {
        MlaSpec spec = small_spec(dtype, mask);
        spec.softcap = more ? 3.0F : 0.0F;
        spec.sinks = more;
        // The first rows see nothing under two of the masks.
        const MlaInputs inputs = random_mla_tensors(spec, 9, 300, more ? 290 : -4, more ? Dtype::kF32 : Dtype::kBf16);
        std::vector<double> out;
        std::vector<double> lse;
        oracle_mla_attention(spec, inputs.w_uk_matrices(), inputs.w_uv_matrices(), inputs.q_view(),
                             inputs.latent_view(), inputs.rope_view(), inputs.offset,
                             spec.sinks ? inputs.sinks.data() : nullptr, out, lse);
        ASSERT_EQ(lse.size(), 27U);
        ASSERT_EQ(out.size(), lse.size() * 16);
        std::vector<double> expected;
        for (std::size_t row = 0; row < lse.size(); ++row) {
          const double expected_lse =
              written_out(inputs, static_cast<std::int64_t>(row) / 3, static_cast<int>(row % 3), expected);
          // fp64 sums in another order: of some hundred terms, each about as large as the greatest.
          if (std::isinf(expected_lse)) {
            EXPECT_EQ(lse[row], expected_lse);
          } else {
            EXPECT_NEAR(lse[row], expected_lse, 1e-12 * std::max(1.0, std::abs(expected_lse)));
          }
          double greatest = 0.0;
          for (const double o : expected) greatest = std::max(greatest, std::abs(o));
          for (std::size_t i = 0; i < expected.size(); ++i, ++compared) {
            EXPECT_NEAR(out[row * 16 + i], expected[i], 1e-12 * greatest) << row << ", " << i;
          }
        }
      }
    }
  }
  EXPECT_EQ(compared, 18 * 27 * 16);
}

// Sampled rows of long sequences are fed piece by piece.
TEST(MlaOracle, RowsFedInPiecesAreTheSame) {
  const MlaSpec spec = small_spec(Dtype::kBf16, {-1, 0});
  const MlaInputs inputs = random_mla_tensors(spec, 4, 700, 690, Dtype::kBf16);
  std::vector<double> out;
  std::vector<double> lse;
  oracle_mla_attention(spec, inputs.w_uk_matrices(), inputs.w_uv_matrices(), inputs.q_view(), inputs.latent_view(),
                       inputs.rope_view(), inputs.offset, nullptr, out, lse);
  std::vector<double> q;
  for (int i = 0; i < 32; ++i) q.push_back(element(inputs.q_view().at(2, 1), spec.dtype, i));
  MlaOracleRow row(spec, inputs.w_uk_matrices(), inputs.w_uv_matrices(), 1, inputs.offset + 2, inputs.keys, q);
  EXPECT_EQ(row.head(), 1);
  std::int64_t begin = 0;
  for (const std::int64_t end : {1, 64, 300, 700}) {
    TensorView latent = inputs.latent_view();
    TensorView k_rope = inputs.rope_view();
    latent.data = latent.at(begin, 0);
    k_rope.data = k_rope.at(begin, 0);
    latent.tokens = k_rope.tokens = end - begin;
    row.feed(begin, latent, k_rope);
    begin = end;
  }
  std::vector<double> o;
  EXPECT_EQ(row.finish(0.0, o), lse[2 * 3 + 1]);
  EXPECT_TRUE(std::equal(o.begin(), o.end(), out.begin() + (2 * 3 + 1) * 16));
}

}  // namespace
}  // namespace ringattn::testing
