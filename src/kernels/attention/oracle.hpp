// SPDX-License-Identifier: Apache-2.0
// The fp64 oracle: attention by its definition, one row at a time, sharing no code with the kernels or the plan. Keys
// and values are streamed in ascending order, so rows of any length fit in memory.
//
// If a score is +∞ or NaN, the row is NaN, as exp(∞ − ∞) is. A row whose visible scores are all −∞ ends like a row that
// sees no key. A finite score's weight is never 0, as in exact arithmetic, so ∞ in V gives ∞ and not 0 · ∞.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace ringattn {

// A row's key blocks of `block` keys in the block mask, ascending. block 0: no block mask.
struct BlockMaskKeys {
  std::int64_t block = 0;
  std::span<const std::int32_t> blocks;
};

// The mask row of query head `head` at `position` of a sequence. No block mask if `block_mask` is null. `heads` is the
// number of query heads.
BlockMaskKeys block_mask_keys(const BlockMask* block_mask, int heads, std::size_t sequence, int head,
                              std::int64_t position);

// Positions of the row's keys in their sequence. Empty: key i is at position i.
using PositionsOfKeys = std::span<const std::int32_t>;

// One query row of one head.
class OracleRow {
 public:
  // `q` is [head_dim]. The row is at `position` of a sequence of `key_length` keys. The memory of `listed` and
  // `positions` must outlive the object.
  OracleRow(const AttentionSpec& spec, int head, std::int64_t position, std::int64_t key_length, std::vector<double> q,
            const BlockMaskKeys& listed = {}, PositionsOfKeys positions = {});

  // Processes keys [first_key, first_key + k.tokens) of the sequence. Calls must be in ascending order, with any number
  // of keys. k: [tokens, kv_heads, head_dim], v: [tokens, kv_heads, head_dim_v].
  void feed(std::int64_t first_key, const TensorView& k, const TensorView& v);

  // Finishes the row. `sink` is used if the spec has sinks. out: [head_dim_v]. Returns LSE (natural logarithm).
  double finish(double sink, std::vector<double>& out) const;

  int head() const { return head_; }

 private:
  friend void feed_rows(std::span<OracleRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v);

  bool sees(std::int64_t key) const;
  // Processes one key that the row sees. k: [head_dim], v: [head_dim_v].
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

// Processes keys for many rows of a sequence, of any heads. Results equal those of OracleRow::feed(), but each key is
// converted only once. About 10⁹ multiply-adds per second on one core. Rows may be divided over threads.
void feed_rows(std::span<OracleRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v);

// Attention of one whole sequence in fp64, for tests: q [rows, heads, head_dim] at positions q_offset, q_offset + 1, ….
// out: [rows, heads, head_dim_v] and lse [rows, heads], both dense, are resized here. `sinks` is [heads] or null.
// `sequence` is the sequence's index in `block_mask` and `positions`.
void oracle_attention(const AttentionSpec& spec, const TensorView& q, const TensorView& k, const TensorView& v,
                      std::int64_t q_offset, const float* sinks, std::vector<double>& out, std::vector<double>& lse,
                      const BlockMask* block_mask = nullptr, std::size_t sequence = 0,
                      const KeyPositions* positions = nullptr);

}  // namespace ringattn
