// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of MLA (mla/mla.hpp): the whole formula, from latents, rotary keys and weight matrices to O and LSE,
// one row at a time, sharing no code with the kernels.
//
// A head's keys and values are linear in the latent, so both weight matrices may be moved out of the sums over keys: q
// · (w_uk c) = (q w_uk) · c and Σ p · (w_uv c) = w_uv (Σ p · c). That is exact; only the order of fp64 sums differs. So
// a row multiplies its query by w_uk once, attends to [c, k_r] with the values c, and is multiplied by w_uv at the end.
// If a latent is not finite, O is not either, but may be NaN instead of ∞.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/oracle.hpp"
#include "kernels/mla/mla.hpp"

namespace ringattn {

// One query row of one head.
class MlaOracleRow {
 public:
  // `q` is [head_dim + rope_dim]. The row is at `position` of a sequence of `key_length` keys. The weight matrices of
  // all heads are w_uk [heads, head_dim, latent_dim] and w_uv [heads, head_dim_v, latent_dim], of any dtype. The memory
  // of w_uv must outlive the object.
  MlaOracleRow(const MlaSpec& spec, const GemmWeights& w_uk, const GemmWeights& w_uv, int head, std::int64_t position,
               std::int64_t key_length, std::span<const double> q);

  // Processes keys [first_key, first_key + latent.tokens) of the sequence. Calls must be in ascending order, with any
  // number of keys. latent: [tokens, 1, latent_dim], k_rope: [tokens, 1, rope_dim].
  void feed(std::int64_t first_key, const TensorView& latent, const TensorView& k_rope);

  // Finishes the row. `sink` is used if the spec has sinks. out: [head_dim_v]. Returns LSE (natural logarithm).
  double finish(double sink, std::vector<double>& out) const;

  int head() const { return head_; }

 private:
  friend void feed_rows(std::span<MlaOracleRow> rows, std::int64_t first_key, const TensorView& latent,
                        const TensorView& k_rope);

  GemmWeights w_uv_;
  int head_;
  OracleRow row_;
};

// Processes keys for many rows of a sequence, of any heads. Results equal those of MlaOracleRow::feed(), but each key
// is converted only once.
void feed_rows(std::span<MlaOracleRow> rows, std::int64_t first_key, const TensorView& latent,
               const TensorView& k_rope);

// MLA of one whole sequence in fp64, for tests: q [rows, heads, head_dim + rope_dim] at positions q_offset, q_offset +
// 1, …. out: [rows, heads, head_dim_v] and lse [rows, heads], both dense, are resized here. `sinks` is [heads] or null.
void oracle_mla_attention(const MlaSpec& spec, const GemmWeights& w_uk, const GemmWeights& w_uv, const TensorView& q,
                          const TensorView& latent, const TensorView& k_rope, std::int64_t q_offset, const float* sinks,
                          std::vector<double>& out, std::vector<double>& lse);

}  // namespace ringattn
