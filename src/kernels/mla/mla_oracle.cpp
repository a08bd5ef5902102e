// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/mla_oracle.hpp"

#include <algorithm>
#include <utility>

namespace ringattn {

namespace {

constexpr std::int64_t kBlockKeys = 256;  // keys concatenated at a time

float element_of(const void* data, Dtype dtype, std::int64_t index) {
  return load_element(static_cast<const std::byte*>(data) + index * static_cast<std::int64_t>(size_of(dtype)), dtype);
}

double element_of(const GemmWeights& matrices, std::int64_t head, std::int64_t dim_n, std::int64_t dim_k) {
  const std::int64_t index = dim_n * matrices.n_stride + dim_k * matrices.k_stride;
  return static_cast<double>(element_of(matrices.at(head), matrices.dtype, index));
}

// [q_nope · w_uk, q_rope].
std::vector<double> absorbed_query(const MlaSpec& spec, const GemmWeights& w_uk, int head, std::span<const double> q) {
  std::vector<double> absorbed(static_cast<std::size_t>(spec.latent_dim), 0.0);
  for (int dim = 0; dim < spec.head_dim; ++dim) {
    for (int i = 0; i < spec.latent_dim; ++i) {
      absorbed[static_cast<std::size_t>(i)] += q[static_cast<std::size_t>(dim)] * element_of(w_uk, head, dim, i);
    }
  }
  const std::span<const double> rotary = q.subspan(static_cast<std::size_t>(spec.head_dim));
  absorbed.insert(absorbed.end(), rotary.begin(), rotary.end());
  return absorbed;
}

}  // namespace

MlaOracleRow::MlaOracleRow(const MlaSpec& spec, const GemmWeights& w_uk, const GemmWeights& w_uv, int head,
                           std::int64_t position, std::int64_t key_length, std::span<const double> q)
    : w_uv_(w_uv),
      head_(head),
      row_(absorbed_spec(spec), head, position, key_length, absorbed_query(spec, w_uk, head, q)) {}

void MlaOracleRow::feed(std::int64_t first_key, const TensorView& latent, const TensorView& k_rope) {
  feed_rows({this, 1}, first_key, latent, k_rope);
}

double MlaOracleRow::finish(double sink, std::vector<double>& out) const {
  std::vector<double> weighted;  // Σ p · c
  const double lse = row_.finish(sink, weighted);
  out.assign(static_cast<std::size_t>(w_uv_.dim_n), 0.0);
  for (std::int64_t dim = 0; dim < w_uv_.dim_n; ++dim) {
    for (std::int64_t i = 0; i < w_uv_.dim_k; ++i) {
      out[static_cast<std::size_t>(dim)] += weighted[static_cast<std::size_t>(i)] * element_of(w_uv_, head_, dim, i);
    }
  }
  return lse;
}

void feed_rows(std::span<MlaOracleRow> rows, std::int64_t first_key, const TensorView& latent,
               const TensorView& k_rope) {
  std::vector<OracleRow> oracle_rows;
  for (MlaOracleRow& row : rows) oracle_rows.push_back(std::move(row.row_));
  // Concatenates the rows [c, k_r] in fp32, which is exact for every dtype.
  const std::int64_t dim = latent.dim + k_rope.dim;
  std::vector<float> keys(static_cast<std::size_t>(std::min(kBlockKeys, latent.tokens) * dim));
  for (std::int64_t begin = 0; begin < latent.tokens; begin += kBlockKeys) {
    const std::int64_t count = std::min(kBlockKeys, latent.tokens - begin);
    for (std::int64_t key = 0; key < count; ++key) {
      float* const row = keys.data() + key * dim;
      for (std::int64_t i = 0; i < latent.dim; ++i) row[i] = element_of(latent.at(begin + key, 0), latent.dtype, i);
      for (std::int64_t i = 0; i < k_rope.dim; ++i) {
        row[latent.dim + i] = element_of(k_rope.at(begin + key, 0), k_rope.dtype, i);
      }
    }
    const TensorView k{keys.data(), Dtype::kF32, count, 1, dim, dim, dim};
    const TensorView v{keys.data(), Dtype::kF32, count, 1, latent.dim, dim, dim};
    feed_rows(oracle_rows, first_key + begin, k, v);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].row_ = std::move(oracle_rows[i]);
}

void oracle_mla_attention(const MlaSpec& spec, const GemmWeights& w_uk, const GemmWeights& w_uv, const TensorView& q,
                          const TensorView& latent, const TensorView& k_rope, std::int64_t q_offset, const float* sinks,
                          std::vector<double>& out, std::vector<double>& lse) {
  out.clear();
  lse.clear();
  std::vector<MlaOracleRow> rows;
  std::vector<double> wide_q(static_cast<std::size_t>(q.dim));
  for (std::int64_t token = 0; token < q.tokens; ++token) {
    for (int head = 0; head < spec.heads; ++head) {
      for (std::int64_t i = 0; i < q.dim; ++i) {
        wide_q[static_cast<std::size_t>(i)] = static_cast<double>(element_of(q.at(token, head), q.dtype, i));
      }
      rows.emplace_back(spec, w_uk, w_uv, head, q_offset + token, latent.tokens, wide_q);
    }
  }
  feed_rows(rows, 0, latent, k_rope);
  std::vector<double> o;
  for (const MlaOracleRow& row : rows) {
    lse.push_back(row.finish(sinks == nullptr ? 0.0 : static_cast<double>(sinks[row.head()]), o));
    out.insert(out.end(), o.begin(), o.end());
  }
}

}  // namespace ringattn
