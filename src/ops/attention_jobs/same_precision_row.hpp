// SPDX-License-Identifier: Apache-2.0
// One row of the same-precision reference: attention as a straightforward fp32 program would compute it. Its error
// bounds the allowed error of kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/attention/key_positions.hpp"
#include "kernels/attention/oracle.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn {

inline float rounded(Dtype dtype, float value) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, value);
  return load_element(bytes, dtype);
}

inline void load_row(const TensorView& view, std::int64_t token, std::int64_t head, std::vector<float>& row) {
  row.resize(static_cast<std::size_t>(view.dim));
  const std::byte* at = view.at(token, head);
  for (float& value : row) {
    value = load_element(at, view.dtype);
    at += size_of(view.dtype);
  }
}

// One row by the same-precision reference, in two passes over its keys: the maximum, then P and O.
class SamePrecisionRow {
 public:
  SamePrecisionRow(const AttentionSpec& spec, int head, std::int64_t position, std::int64_t key_length,
                   const BlockMaskKeys& listed, PositionsOfKeys positions, std::vector<float> q, float sink)
      : spec_(spec),
        kv_head_(head / (spec.heads / spec.kv_heads)),
        listed_(listed),
        keys_(positions.empty() ? Visibility(spec.mask, key_length).keys(position)
                                : PositionedVisibility(spec.mask, positions).keys(position)),
        q_(std::move(q)),
        sink_(sink),
        max_(sink),
        o_(static_cast<std::size_t>(spec.head_dim_v), 0.0F),
        run_(o_.size(), 0.0F) {}

  const KeyRange& keys() const { return keys_; }
  int kv_head() const { return kv_head_; }
  bool lists(std::int64_t key) const {
    return listed_.block == 0 || std::ranges::binary_search(listed_.blocks, key / listed_.block);
  }

  void find_maximum(std::int64_t first_key, const TensorView& k) {
    for_each_key(first_key, k.tokens, [&](std::int64_t row) { max_ = std::max(max_, score(k, row)); });
  }

  void accumulate(std::int64_t first_key, const TensorView& k, const TensorView& v) {
    for_each_key(first_key, k.tokens, [&](std::int64_t row) {
      const float p = std::exp(score(k, row) - max_);
      run_sum_ += p;
      const float weight = rounded(spec_.dtype, p);
      load_row(v, row, kv_head_, values_);
      for (std::size_t i = 0; i < run_.size(); ++i) run_[i] += weight * values_[i];
      if (++run_keys_ == kRunKeys) close_run();
    });
  }

  // Valid after finish().
  float lse() const { return max_ + std::log(whole_sum()); }

  // O, rounded to the dtype.
  std::vector<float> finish() {
    close_run();
    const float sum = whole_sum();
    std::vector<float> out;
    for (const float o : o_) out.push_back(rounded(spec_.dtype, sum == 0.0F ? 0.0F : o / sum));
    return out;
  }

 private:
  static constexpr std::int64_t kRunKeys = 128;  // keys that are summed before the sum is added to the others

  template <typename Visit>
  void for_each_key(std::int64_t first_key, std::int64_t tokens, const Visit& visit) {
    const std::int64_t begin = std::max(keys_.begin, first_key);
    const std::int64_t end = std::min(keys_.end, first_key + tokens);
    for (std::int64_t key = begin; key < end; ++key) {
      if (lists(key)) visit(key - first_key);
    }
  }

  float score(const TensorView& k, std::int64_t row) {
    load_row(k, row, kv_head_, keys_row_);
    float s = 0.0F;
    for (std::size_t i = 0; i < q_.size(); ++i) s += q_[i] * keys_row_[i];
    const float x = rounded(spec_.dtype, s) * spec_.softmax_scale;
    return spec_.softcap > 0.0F ? spec_.softcap * std::tanh(x / spec_.softcap) : x;
  }

  float whole_sum() const {
    return sum_ + (sink_ == -std::numeric_limits<float>::infinity() ? 0.0F : std::exp(sink_ - max_));
  }

  void close_run() {
    sum_ += std::exchange(run_sum_, 0.0F);
    for (std::size_t i = 0; i < o_.size(); ++i) o_[i] += std::exchange(run_[i], 0.0F);
    run_keys_ = 0;
  }

  AttentionSpec spec_;
  int kv_head_;
  BlockMaskKeys listed_;
  KeyRange keys_;
  std::vector<float> q_;
  float sink_;  // −∞: none
  float max_;
  float sum_ = 0.0F;
  std::vector<float> o_;
  float run_sum_ = 0.0F;
  std::vector<float> run_;
  std::int64_t run_keys_ = 0;
  std::vector<float> keys_row_;
  std::vector<float> values_;
};

}  // namespace ringattn
