// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle: attention by its definition, one row at a time, sharing no code with the kernels or the plan.
// Keys and values are streamed in pieces in ascending order, so rows of any length fit.
//
// Where a score is +∞ or NaN the row is NaN, as exp(∞ − ∞) is. A row whose every visible score is −∞ has no weight to
// give and ends like a row that sees no key. A finite score's weight is never 0, as in exact arithmetic: ∞ in V makes
// ∞, not 0 · ∞.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention.hpp"

namespace ringattn {

// The blocks of `block` keys that a row may see beside what the mask says, ascending; block 0: all of them.
struct BlockMaskKeys {
  std::int64_t block = 0;
  std::span<const std::int32_t> blocks;
};

// What the query head `head` at `position` of a sequence may see; all where `lists` is null. `heads`: query heads.
BlockMaskKeys block_mask_keys(const BlockMask* block_mask, int heads, std::size_t sequence, int head,
                              std::int64_t position);

// Where the row's keys stand in their sequence; empty: key i at position i.
using PositionsOfKeys = std::span<const std::int32_t>;

// One query row of one head, as the oracle computes it.
class OracleRow {
 public:
  // `q` is [head_dim]. The row stands at `position` of a sequence of `key_length` keys. What `listed` and `positions`
  // refer to outlives the object.
  OracleRow(const AttentionSpec& spec, int head, std::int64_t position, std::int64_t key_length, std::vector<double> q,
            const BlockMaskKeys& listed = {}, PositionsOfKeys positions = {});

  // Feeds the keys [first_key, first_key + k.tokens) of the sequence; pieces ascend and may be of any size.
  // k: [tokens, kv_heads, head_dim], v: [tokens, kv_heads, head_dim_v].
  void feed(std::int64_t first_key, const TensorView& k, const TensorView& v);

  // Ends the row; `sink` is used when the spec has sinks. out: [head_dim_v]; returns LSE (natural logarithm).
  double finish(double sink, std::vector<double>& out) const;

  int head() const { return head_; }

 private:
  friend void feed_rows(std::span<OracleRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v);

  bool sees(std::int64_t key) const;
  // k: [head_dim], v: [head_dim_v]: one key that the row sees.
  void attend_key(const double* k, const double* v);

  AttentionSpec spec_;
  int head_;
  std::int64_t position_;
  std::int64_t key_length_;
  BlockMaskKeys listed_;
  PositionsOfKeys positions_;
  std::vector<double> q_;
  double max_;
  double sum_ = 0.0;
  std::vector<double> o_;
};

// Feeds one piece to many rows of a sequence, of any heads; the same numbers as row by row, but each key is converted
// once for all of them. About 10⁹ multiply-adds a second on one core; rows may be spread over threads.
void feed_rows(std::span<OracleRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v);

// Whole attention of one sequence in fp64, for tests: q [rows, heads, head_dim] at positions q_offset, q_offset + 1, ….
// out: [rows, heads, head_dim_v] and lse [rows, heads], both dense, resized here. `sinks` is [heads] or null. Where
// there are `lists` or `positions`, the sequence is theirs of number `sequence`.
void oracle_attention(const AttentionSpec& spec, const TensorView& q, const TensorView& k, const TensorView& v,
                      std::int64_t q_offset, const float* sinks, std::vector<double>& out, std::vector<double>& lse,
                      const BlockMask* block_mask = nullptr, std::size_t sequence = 0,
                      const KeyPositions* positions = nullptr);

}  // namespace ringattn
