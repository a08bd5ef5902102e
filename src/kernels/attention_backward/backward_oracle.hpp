// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle of attention's gradients: the formulas of attention_backward.hpp, one pair of a query and a key at a
// time, sharing no code with the kernels or the plan. Block masks and position arrays are not supported.
//
// Pairs that the mask excludes are never read. All else follows IEEE arithmetic: if a score is −∞, P is 0, and dS · K
// is NaN where K is infinite. A row whose LSE is −∞ is computed with LSE 0, and has no term in the sinks' gradient. A
// row that sees no key has dQ = 0; if there is a sink, the sink's gradient gets the row's dLSE.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn {

// Values of one query row that all of its pairs share.
struct OracleRowStats {
  double lse = 0.0;    // natural logarithm
  double delta = 0.0;  // rowsum(dO ∘ O) − dLSE
};

// The row stats of queries, [rows, heads], from the forward's results. out and dout: [rows, heads, head_dim_v], lse and
// dlse: [rows, heads]. Null data of dlse: 0.
std::vector<OracleRowStats> oracle_row_stats(const TensorView& out, const RowView& lse, const TensorView& dout,
                                             const RowView& dlse);

// dQ of one query row of one head.
class OracleDqRow {
 public:
  // `q` is [head_dim] and `dout` is [head_dim_v]. The row is at `position` of a sequence of `key_length` keys.
  OracleDqRow(const AttentionSpec& spec, int head, std::int64_t position, std::int64_t key_length,
              std::vector<double> q, std::vector<double> dout, const OracleRowStats& stats);

  // Adds keys [first_key, first_key + k.tokens) of the sequence. Calls must be in ascending order, with any number of
  // keys. k: [tokens, kv_heads, head_dim], v: [tokens, kv_heads, head_dim_v].
  void feed(std::int64_t first_key, const TensorView& k, const TensorView& v);

  // dQ so far: [head_dim].
  std::vector<double> finish() const;

 private:
  friend void feed_rows(std::span<OracleDqRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v);

  AttentionSpec spec_;
  int head_;
  std::int64_t position_;
  std::int64_t key_length_;
  std::vector<double> q_;
  std::vector<double> dout_;
  OracleRowStats stats_;
  std::vector<double> sum_;  // of dS · K, without softmax_scale
};

// Adds keys to many rows of a sequence, of any heads. Results equal those of OracleDqRow::feed(), but each key is
// converted only once. Rows may be divided over threads.
void feed_rows(std::span<OracleDqRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v);

// dK and dV of one key row of one KV head.
class OracleDkvRow {
 public:
  // `k` is [head_dim] and `v` is [head_dim_v]: the sequence's key `key`.
  OracleDkvRow(const AttentionSpec& spec, int kv_head, std::int64_t key, std::vector<double> k, std::vector<double> v);

  // Adds the queries at positions [first_position, first_position + q.tokens) of the sequence. Calls must be in
  // ascending order, with any number of queries. q: [tokens, heads, head_dim], dout: [tokens, heads, head_dim_v],
  // stats: [tokens, heads].
  void feed(std::int64_t first_position, const TensorView& q, const TensorView& dout,
            std::span<const OracleRowStats> stats);

  // The gradients so far. dk: [head_dim], dv: [head_dim_v].
  void finish(std::vector<double>& dk, std::vector<double>& dv) const;

 private:
  friend void feed_rows(std::span<OracleDkvRow> rows, std::int64_t first_position, const TensorView& q,
                        const TensorView& dout, std::span<const OracleRowStats> stats);

  AttentionSpec spec_;
  int kv_head_;
  std::int64_t key_;
  std::vector<double> k_;
  std::vector<double> v_;
  std::vector<double> dk_sum_;  // without softmax_scale
  std::vector<double> dv_;
};

// Adds queries to many key rows of a sequence, of any KV heads. Results equal those of OracleDkvRow::feed(), but each
// query is converted only once. Rows may be divided over threads.
void feed_rows(std::span<OracleDkvRow> rows, std::int64_t first_position, const TensorView& q, const TensorView& dout,
               std::span<const OracleRowStats> stats);

// One whole sequence.
struct BackwardOracleInputs {
  TensorView q;     // [rows, heads, head_dim], at positions q_offset, q_offset + 1, …
  TensorView k;     // [keys, kv_heads, head_dim]
  TensorView v;     // [keys, kv_heads, head_dim_v]
  TensorView dout;  // [rows, heads, head_dim_v]
  RowView dlse;     // [rows, heads]; null data: 0
  std::int64_t q_offset = 0;
  const float* sinks = nullptr;  // [heads], with AttentionSpec::sinks
  // The forward's results, from which P and delta are computed as in the kernels. If `out` has null data, both are
  // computed in fp64 from q, k and v.
  TensorView out{};  // [rows, heads, head_dim_v]
  RowView lse{};     // [rows, heads]
};

// Dense gradients of one sequence.
struct OracleGradients {
  std::vector<double> dq;      // [rows, heads, head_dim]
  std::vector<double> dk;      // [keys, kv_heads, head_dim]
  std::vector<double> dv;      // [keys, kv_heads, head_dim_v]
  std::vector<double> dsinks;  // [heads], empty without sinks
};

// The gradients in fp64, for tests.
OracleGradients oracle_attention_backward(const AttentionSpec& spec, const BackwardOracleInputs& inputs);

// The same-precision reference, whose error bounds that of kernels: all arithmetic in fp32, P and dS rounded once to
// the dtype, the gradients rounded to theirs. Without `out`, the forward's results are those of fp64, rounded.
OracleGradients same_precision_attention_backward(const AttentionBackwardSpec& spec,
                                                  const BackwardOracleInputs& inputs);

}  // namespace ringattn
