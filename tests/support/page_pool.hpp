// SPDX-License-Identifier: Apache-2.0
// A cache of all sequences of AttentionInputs: which page each sequence's tokens are in. Entries that no sequence owns
// are NaN, including those after the last token in a sequence's last page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/cache_view.hpp"
#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

// A page that no pool has, for table entries that must not be read.
inline constexpr std::int32_t kNoPage = 0x40000000;

struct PageLayout {
  std::int64_t page_size = 0;  // 0: dense
  bool head_major = false;     // within a page, or a dense sequence
  std::uint64_t shuffle = 1;   // the order of pages
  // This many tokens of every sequence, a multiple of the page, lie in pages of sequence 0: they are the same tokens.
  std::int64_t shared = 0;
  // Elements after each page, which are NaN too: pages don't follow each other as their rows do.
  std::int64_t gap = 0;
  // Like `shared`, for prefixes that sequences share (SharedPrefixes): the whole pages of a prefix are those of the
  // first sequence that has it.
  std::vector<std::int32_t> prefix_of = {};
  std::vector<std::int64_t> prefix_tokens = {};
};

class PagePool {
 public:
  PagePool(const std::vector<SequenceShape>& sequences, const PageLayout& layout);

  // K or V of the inputs' sequences in the pool: `rows` are theirs, [k_tokens, kv_heads, dim].
  std::vector<std::byte> fill(const AttentionInputs& inputs, const std::vector<std::byte>& rows, int dim) const;
  // `data` as a pool that fill() made.
  CacheView view(const void* data, const AttentionSpec& spec, int dim) const;

  std::int64_t pages() const { return count_; }
  // [sequences, table_width()]; kNoPage after a sequence's last page. Empty where the cache is dense.
  std::vector<std::int32_t> table() const;
  std::int64_t table_width() const { return table_width_; }
  // The page of a sequence's tokens [i · page_size, (i + 1) · page_size).
  std::int32_t page(std::size_t sequence, std::int64_t i) const {
    return pages_[sequence][static_cast<std::size_t>(i)];
  }

 private:
  PageLayout layout_;
  bool paged_;
  std::int64_t page_size_ = 0;
  std::int64_t table_width_ = 0;
  std::int64_t count_ = 0;
  std::vector<std::vector<std::int32_t>> pages_;  // by sequence
};

}  // namespace ringattn::testing
