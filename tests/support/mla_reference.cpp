// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mla_reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/mla/mla_oracle.hpp"

namespace ringattn::testing {

namespace {

TensorView rows_of(const std::vector<std::byte>& packed, Dtype dtype, std::int64_t first, std::int64_t count, int heads,
                   int dim) {
  const void* const data = packed.data() + static_cast<std::size_t>(first * heads * dim) * size_of(dtype);
  return dense_view(data, dtype, count, heads, dim);
}

float number(const TensorView& view, std::int64_t token, std::int64_t head, std::int64_t dim) {
  return load_element(view.at(token, head) + static_cast<std::size_t>(dim) * size_of(view.dtype), view.dtype);
}

// round(Σ rows · matrix), followed by the `beside` columns from `from` on of another tensor: [tokens, heads, dim_n +
// beside]. Sums are fp32, one number after the other.
std::vector<std::byte> product(const TensorView& rows, int first_dim, const GemmWeights& matrices,
                               const TensorView& beside, std::int64_t from, std::int64_t columns) {
  const std::size_t element = size_of(rows.dtype);
  std::vector<std::byte> out;
  const auto push = [&](float value) {
    out.resize(out.size() + element);
    store_element(out.data() + out.size() - element, rows.dtype, value);
  };
  for (std::int64_t token = 0; token < rows.tokens; ++token) {
    for (std::int64_t head = 0; head < matrices.heads; ++head) {
      for (std::int64_t o = 0; o < matrices.dim_n; ++o) {
        float sum = 0.0F;
        for (std::int64_t i = 0; i < matrices.dim_k; ++i) {
          const std::int64_t at = o * matrices.n_stride + i * matrices.k_stride;
          sum += number(rows, token, rows.heads == 1 ? 0 : head, first_dim + i) *
                 load_element(matrices.at(head) + static_cast<std::size_t>(at) * element, rows.dtype);
        }
        push(sum);
      }
      for (std::int64_t c = 0; c < columns; ++c) push(number(beside, token, beside.heads == 1 ? 0 : head, from + c));
    }
  }
  return out;
}

// By the same-precision computation in a form.
Numbers same_precision_mla_numbers(const MlaJob& job, MlaForm form, const MlaTensors& tensors) {
  const MlaSpec& spec = job.spec;
  const std::int64_t queries = job.batch.q_tokens();
  const std::int64_t keys = job.batch.k_tokens();
  const TensorView q = rows_of(tensors.q, spec.dtype, 0, queries, spec.heads, spec.head_dim + spec.rope_dim);
  const TensorView latent = rows_of(tensors.latent, spec.dtype, 0, keys, 1, spec.latent_dim);
  const TensorView k_rope = rows_of(tensors.k_rope, spec.dtype, 0, keys, 1, spec.rope_dim);
  const GemmWeights w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
  const GemmWeights w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
  AttentionInputs inputs;
  inputs.spec = form_spec(spec, form, spec.heads);
  for (const Sequence& s : job.batch.sequences) inputs.sequences.push_back({s.q_len, s.k_len, s.q_offset});
  inputs.sinks = tensors.sinks;
  if (form == MlaForm::kExpanded) {
    inputs.q = tensors.q;
    inputs.k = product(latent, 0, w_uk, k_rope, 0, spec.rope_dim);
    inputs.v = product(latent, 0, w_uv, {}, 0, 0);
    return same_precision_reference(inputs);
  }
  inputs.q = product(q, 0, w_uk.transposed(), q, spec.head_dim, spec.rope_dim);
  for (std::int64_t key = 0; key < keys; ++key) {
    const auto add = [key](std::vector<std::byte>& to, const std::vector<std::byte>& from, std::size_t bytes) {
      const auto begin = from.begin() + key * static_cast<std::int64_t>(bytes);
      to.insert(to.end(), begin, begin + static_cast<std::int64_t>(bytes));
    };
    const std::size_t element = size_of(spec.dtype);
    add(inputs.k, tensors.latent, static_cast<std::size_t>(spec.latent_dim) * element);
    add(inputs.k, tensors.k_rope, static_cast<std::size_t>(spec.rope_dim) * element);
  }
  inputs.v = tensors.latent;
  Numbers numbers = same_precision_reference(inputs);
  std::vector<std::byte> in_latent(numbers.out.size() * size_of(spec.dtype));
  for (std::size_t i = 0; i < numbers.out.size(); ++i) {
    store_element(in_latent.data() + i * size_of(spec.dtype), spec.dtype, static_cast<float>(numbers.out[i]));
  }
  const std::vector<std::byte> out =
      product(rows_of(in_latent, spec.dtype, 0, queries, spec.heads, spec.latent_dim), 0, w_uv, {}, 0, 0);
  numbers.out.clear();
  for (std::size_t at = 0; at < out.size(); at += size_of(spec.dtype)) {
    numbers.out.push_back(static_cast<double>(load_element(out.data() + at, spec.dtype)));
  }
  return numbers;
}

Numbers oracle_mla_numbers(const MlaJob& job, const MlaTensors& tensors) {
  const MlaSpec& spec = job.spec;
  Numbers numbers;
  std::int64_t query = 0;
  std::int64_t key = 0;
  for (const Sequence& s : job.batch.sequences) {
    std::vector<double> out;
    std::vector<double> lse;
    oracle_mla_attention(spec, matrices_of(tensors.w_uk, spec, spec.head_dim),
                         matrices_of(tensors.w_uv, spec, spec.head_dim_v),
                         rows_of(tensors.q, spec.dtype, query, s.q_len, spec.heads, spec.head_dim + spec.rope_dim),
                         rows_of(tensors.latent, spec.dtype, key, s.k_len, 1, spec.latent_dim),
                         rows_of(tensors.k_rope, spec.dtype, key, s.k_len, 1, spec.rope_dim), s.q_offset,
                         spec.sinks ? tensors.sinks.data() : nullptr, out, lse);
    numbers.out.insert(numbers.out.end(), out.begin(), out.end());
    numbers.lse.insert(numbers.lse.end(), lse.begin(), lse.end());
    query += s.q_len;
    key += s.k_len;
  }
  return numbers;
}

// The greatest difference from the oracle; where one of both is not finite, the other must be the same.
double greatest_error(const std::vector<double>& values, const std::vector<double>& oracle) {
  double error = 0.0;
  EXPECT_EQ(values.size(), oracle.size());
  for (std::size_t i = 0; i < std::min(values.size(), oracle.size()); ++i) {
    if (!std::isfinite(oracle[i]) || !std::isfinite(values[i])) {
      EXPECT_TRUE(values[i] == oracle[i]) << "number " << i << " is " << values[i] << ", the oracle has " << oracle[i];
      continue;
    }
    error = std::max(error, std::abs(values[i] - oracle[i]));
  }
  return error;
}

}  // namespace

Numbers numbers_of(const JobResult& result, Dtype dtype) {
  Numbers numbers;
  for (std::size_t at = 0; at < result.out.size(); at += size_of(dtype)) {
    numbers.out.push_back(static_cast<double>(load_element(result.out.data() + at, dtype)));
  }
  for (const float lse : result.lse) numbers.lse.push_back(static_cast<double>(lse));
  return numbers;
}

void expect_as_right(const MlaJob& job, const MlaTensors& tensors, const JobResult& result) {
  const Numbers oracle = oracle_mla_numbers(job, tensors);
  ASSERT_FALSE(oracle.out.empty());
  const double lse_slack = job.spec.dtype == Dtype::kF32 ? 10.0 * kLseRelativeFp32 : kLseAbsoluteSixteenBit;
  const Numbers same_precision = same_precision_mla_numbers(job, *job.form, tensors);
  const Numbers ours = numbers_of(result, job.spec.dtype);
  EXPECT_LE(greatest_error(ours.out, oracle.out), 2.0 * greatest_error(same_precision.out, oracle.out) + kOutputSlack);
  EXPECT_LE(greatest_error(ours.lse, oracle.lse), 2.0 * greatest_error(same_precision.lse, oracle.lse) + lse_slack);
}

}  // namespace ringattn::testing
