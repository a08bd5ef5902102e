// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/oracle_math.hpp"

namespace ringattn {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kBlockKeys = 64;  // keys converted at a time

// exp(x − max), but never 0 for a finite x.
double weight(double x, double max) {
  const double w = std::exp(x - max);
  return x > -kInfinity ? std::max(w, std::numeric_limits<double>::min()) : w;
}

}  // namespace

BlockMaskKeys block_mask_keys(const BlockMask* block_mask, int heads, std::size_t sequence, int head,
                              std::int64_t position) {
  if (block_mask == nullptr) return {};
  const BlockMaskShape& shape = block_mask->shape();
  const auto block =
      static_cast<std::int64_t>(std::floor(static_cast<double>(position) / static_cast<double>(shape.query_block)));
  return {shape.key_block, block_mask->row(sequence, head * shape.heads / heads, block)};
}

OracleRow::OracleRow(const AttentionSpec& spec, int head, std::int64_t position, std::int64_t key_length,
                     std::vector<double> q, const BlockMaskKeys& listed, PositionsOfKeys positions)
    : spec_(spec),
      head_(head),
      position_(position),
      key_length_(key_length),
      listed_(listed),
      positions_(positions),
      q_(std::move(q)),
      max_(-kInfinity),
      o_(static_cast<std::size_t>(spec.head_dim_v), 0.0) {}

bool OracleRow::sees(std::int64_t key) const {
  if (key < 0 || key >= key_length_) return false;
  const std::int64_t at = positions_.empty() ? key : positions_[static_cast<std::size_t>(key)];
  if (spec_.mask.left >= 0 && at < position_ - spec_.mask.left) return false;
  if (spec_.mask.right >= 0 && at > position_ + spec_.mask.right) return false;
  return listed_.block == 0 || std::binary_search(listed_.blocks.begin(), listed_.blocks.end(), key / listed_.block);
}

void OracleRow::attend_key(const double* k, const double* v) {
  double score = dot(q_.data(), k, q_.size()) * static_cast<double>(spec_.softmax_scale);
  if (spec_.softcap > 0.0F) {
    const auto cap = static_cast<double>(spec_.softcap);
    score = cap * std::tanh(score / cap);
  }
  if (score > max_) {
    if (max_ > -kInfinity) {
      const double scale = weight(max_, score);
      sum_ *= scale;
      for (double& o : o_) o *= scale;
    }
    max_ = score;
  }
  const double p = weight(score, max_ == -kInfinity ? 0.0 : max_);
  sum_ += p;
  add_scaled(p, v, o_.size(), o_.data());
}

void OracleRow::feed(std::int64_t first_key, const TensorView& k, const TensorView& v) {
  feed_rows({this, 1}, first_key, k, v);
}

double OracleRow::finish(double sink, std::vector<double>& out) const {
  double max = max_;
  double sum = sum_;
  double scale = 1.0;
  if (spec_.sinks) {
    if (sink > max || std::isnan(sink)) max = sink;
    const double reference = max == -kInfinity ? 0.0 : max;
    scale = weight(max_, reference);
    sum = sum_ * scale + std::exp(sink - reference);
  }
  out.resize(o_.size());
  for (std::size_t i = 0; i < o_.size(); ++i) out[i] = sum == 0.0 ? o_[i] : o_[i] * scale / sum;
  return max + std::log(sum);
}

void feed_rows(std::span<OracleRow> rows, std::int64_t first_key, const TensorView& k, const TensorView& v) {
  if (rows.empty()) return;
  const AttentionSpec& spec = rows[0].spec_;
  std::vector<double> wide_k(static_cast<std::size_t>(kBlockKeys * spec.head_dim));
  std::vector<double> wide_v(static_cast<std::size_t>(kBlockKeys * spec.head_dim_v));
  for (std::int64_t begin = 0; begin < k.tokens; begin += kBlockKeys) {
    const std::int64_t count = std::min(kBlockKeys, k.tokens - begin);
    for (int kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
      bool converted = false;
      for (OracleRow& row : rows) {
        if (row.head_ / (spec.heads / spec.kv_heads) != kv_head) continue;
        for (std::int64_t i = 0; i < count; ++i) {
          if (!row.sees(first_key + begin + i)) continue;
          if (!converted) {
            for (std::int64_t j = 0; j < count; ++j) {
              widen_row(k, begin + j, kv_head, wide_k.data() + j * spec.head_dim);
              widen_row(v, begin + j, kv_head, wide_v.data() + j * spec.head_dim_v);
            }
            converted = true;
          }
          row.attend_key(wide_k.data() + i * spec.head_dim, wide_v.data() + i * spec.head_dim_v);
        }
      }
    }
  }
}

void oracle_attention(const AttentionSpec& spec, const TensorView& q, const TensorView& k, const TensorView& v,
                      std::int64_t q_offset, const float* sinks, std::vector<double>& out, std::vector<double>& lse,
                      const BlockMask* block_mask, std::size_t sequence, const KeyPositions* positions) {
  out.clear();
  lse.clear();
  std::vector<OracleRow> rows;
  for (std::int64_t token = 0; token < q.tokens; ++token) {
    for (int head = 0; head < spec.heads; ++head) {
      std::vector<double> wide_q(static_cast<std::size_t>(spec.head_dim));
      widen_row(q, token, head, wide_q.data());
      rows.emplace_back(spec, head, q_offset + token, k.tokens, std::move(wide_q),
                        block_mask_keys(block_mask, spec.heads, sequence, head, q_offset + token),
                        positions_of(positions, sequence, head / (spec.heads / spec.kv_heads)));
    }
  }
  feed_rows(rows, 0, k, v);
  std::vector<double> o;
  for (const OracleRow& row : rows) {
    lse.push_back(row.finish(sinks == nullptr ? 0.0 : static_cast<double>(sinks[row.head()]), o));
    out.insert(out.end(), o.begin(), o.end());
  }
}

}  // namespace ringattn
