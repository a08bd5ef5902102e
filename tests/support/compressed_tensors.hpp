// SPDX-License-Identifier: Apache-2.0
// Tensors to compress, formats to compress them in, and compressed caches in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/decode/decode.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"
#include "kernels/quant/tensor_compression.hpp"

namespace ringattn::testing {

// Every format, with all of its parameters, that fits a dim that is a multiple of 64. Formats with a rank come last.
std::vector<RowFormat> every_format();
// Those formats that decode kernels read.
std::vector<RowFormat> quantized_formats();
// "int4_channel_group_32": a name for a test.
std::string test_name(const RowFormat& format);

// Normal values. Some channels are 20 times as large, and the first token of each sequence is 3 times as large.
std::vector<std::byte> outlier_rows(const RowShape& shape, std::span<const std::int64_t> lengths, std::uint64_t seed);

inline TensorView view_of(const std::vector<std::byte>& rows, const RowShape& shape, std::int64_t tokens) {
  return dense_view(static_cast<const void*>(rows.data()), shape.dtype, tokens, shape.heads, shape.dim);
}

// Pages of that many tokens in a shuffled order, the same for every tensor of the cache. Entry [s, i] is at s · columns
// + i.
struct PageOrder {
  std::vector<std::int32_t> table;
  std::int64_t columns = 0;
  std::int64_t pages = 0;
  std::int64_t page_size = 0;

  BlockTable view() const { return {table.data(), columns}; }
};
// Pages for `lengths` tokens of each sequence, and three pages that no sequence owns.
PageOrder shuffled_pages(std::span<const std::int64_t> lengths, std::int64_t page_size, std::uint64_t seed);

// A compressed cache with memory of its own. Bytes that no token owns are 0xff: NaN, or invalid quantized values.
class CompressedPool {
 public:
  // Head-major: the tokens of a head follow each other in a page.
  CompressedPool(const RowFormat& format, const RowShape& shape, const PageOrder& order, std::int64_t sequences,
                 bool head_major = false);

  // Copies tables, and those rows of the tensor that a partition holds. KV splits have that many keys.
  void fill(const CompressedTensor& tensor, const KvPartition& partition = {}, std::int64_t kv_split_keys = 1);
  CompressedCache view();
  bool same_bytes(const CompressedPool& other) const { return streams_ == other.streams_ && tables_ == other.tables_; }

 private:
  RowFormat format_;
  RowShape shape_;
  PageOrder order_;
  bool head_major_;
  std::vector<std::vector<std::byte>> streams_, tables_;
};

}  // namespace ringattn::testing
