// SPDX-License-Identifier: Apache-2.0
#include "tests/support/page_pool.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "tests/support/poison.hpp"

namespace ringattn::testing {

PagePool::PagePool(const std::vector<SequenceShape>& sequences, const PageLayout& layout)
    : layout_(layout), paged_(layout.page_size > 0) {
  std::int64_t longest = 1;
  for (const SequenceShape& shape : sequences) longest = std::max(longest, shape.k_len);
  // A dense cache has spare tokens after its longest sequence, and not a whole number of tiles.
  page_size_ = paged_ ? layout.page_size : longest + 5;
  table_width_ = paged_ ? longest / page_size_ + 2 : 0;
  std::int64_t pages = 0;
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const std::int64_t own = paged_ ? (sequences[s].k_len + page_size_ - 1) / page_size_ : 1;
    std::vector<std::int32_t> list;
    std::size_t from = 0;  // the sequence whose pages it shares
    std::int64_t tokens = layout.shared;
    if (!layout.prefix_of.empty()) {
      const std::int32_t prefix = layout.prefix_of[s];
      from = static_cast<std::size_t>(std::ranges::find(layout.prefix_of, prefix) - layout.prefix_of.begin());
      const bool is_one = prefix >= 0 && static_cast<std::size_t>(prefix) < layout.prefix_tokens.size();
      tokens = is_one ? layout.prefix_tokens[static_cast<std::size_t>(prefix)] : 0;
    }
    for (std::int64_t i = 0; i < own; ++i) {
      const bool shared = paged_ && s > from && (i + 1) * page_size_ <= std::min(tokens, sequences[from].k_len);
      list.push_back(shared ? pages_[from][static_cast<std::size_t>(i)] : static_cast<std::int32_t>(pages++));
    }
    pages_.push_back(list);
  }
  count_ = pages;
  if (!paged_) return;
  count_ += 3;  // some that no sequence owns
  std::vector<std::int32_t> order(static_cast<std::size_t>(count_));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(layout.shuffle);
  std::shuffle(order.begin(), order.end(), generator);
  for (std::vector<std::int32_t>& list : pages_) {
    for (std::int32_t& page : list) page = order[static_cast<std::size_t>(page)];
  }
}

std::vector<std::byte> PagePool::fill(const AttentionInputs& inputs, const std::vector<std::byte>& rows,
                                      int dim) const {
  const CacheView view = this->view(nullptr, inputs.spec, dim);
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * size_of(view.dtype);
  std::vector<std::byte> memory(static_cast<std::size_t>(count_ * view.page_stride) * size_of(view.dtype), kPoison);
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    for (std::int64_t token = 0; token < inputs.sequences[s].k_len; ++token) {
      const std::int64_t page = pages_[s][static_cast<std::size_t>(token / page_size_)];
      for (int head = 0; head < inputs.spec.kv_heads; ++head) {
        const std::int64_t to =
            page * view.page_stride + token % page_size_ * view.token_stride + head * view.head_stride;
        const std::int64_t from = ((inputs.k_begin(s) + token) * inputs.spec.kv_heads + head) * dim;
        std::memcpy(memory.data() + static_cast<std::size_t>(to) * size_of(view.dtype),
                    rows.data() + static_cast<std::size_t>(from) * size_of(view.dtype), row_bytes);
      }
    }
  }
  return memory;
}

CacheView PagePool::view(const void* data, const AttentionSpec& spec, int dim) const {
  const std::int64_t heads = spec.kv_heads;
  return {data,
          spec.dtype,
          count_,
          page_size_,
          heads,
          dim,
          page_size_ * heads * dim + layout_.gap,
          layout_.head_major ? dim : heads * dim,
          layout_.head_major ? page_size_ * dim : dim};
}

std::vector<std::int32_t> PagePool::table() const {
  std::vector<std::int32_t> entries;
  if (!paged_) return entries;
  for (const std::vector<std::int32_t>& list : pages_) {
    entries.insert(entries.end(), list.begin(), list.end());
    entries.insert(entries.end(), static_cast<std::size_t>(table_width_) - list.size(), kNoPage);
  }
  return entries;
}

}  // namespace ringattn::testing
