// SPDX-License-Identifier: Apache-2.0
#include "tests/support/compressed_tensors.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/decode/cache_partition.hpp"
#include "kernels/quant/low_rank.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

std::vector<RowFormat> quantized_formats() {
  return {{RowEncoding::kFp8, ScaleGrain::kTensor},
          {RowEncoding::kFp8, ScaleGrain::kHead},
          {RowEncoding::kFp8, ScaleGrain::kTokenHead},
          {RowEncoding::kInt8},
          {RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 32},
          {RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 64},
          {RowEncoding::kInt4Token, ScaleGrain::kTokenHead, 32},
          {RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, 2},
          {RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, 8}};
}

std::vector<RowFormat> every_format() {
  std::vector<RowFormat> formats = quantized_formats();
  if (!has_low_rank()) return formats;
  formats.push_back({RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, 24});
  formats.push_back({RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4});
  return formats;
}

std::string test_name(const RowFormat& format) {
  std::string name = describe(format);
  std::ranges::replace(name, ' ', '_');
  return name;
}

std::vector<std::byte> outlier_rows(const RowShape& shape, std::span<const std::int64_t> lengths, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Normal normal;
  const auto element = static_cast<std::int64_t>(size_of(shape.dtype));
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * shape.heads * shape.dim * element));
  std::byte* at = rows.data();
  for (const std::int64_t length : lengths) {
    for (std::int64_t token = 0; token < length; ++token) {
      for (std::int64_t i = 0; i < shape.heads * shape.dim; ++i, at += element) {
        const float channel = i % shape.dim % 29 == 5 ? 20.0F : 1.0F;
        store_element(at, shape.dtype, normal(random) * channel * (token == 0 ? 3.0F : 1.0F));
      }
    }
  }
  return rows;
}

PageOrder shuffled_pages(std::span<const std::int64_t> lengths, std::int64_t page_size, std::uint64_t seed) {
  PageOrder order;
  order.columns = 1;
  order.page_size = page_size;
  std::vector<std::int64_t> pages;
  for (const std::int64_t length : lengths) {
    pages.push_back((length + page_size - 1) / page_size);
    order.columns = std::max(order.columns, pages.back());
    order.pages += pages.back();
  }
  order.pages += 3;
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(order.pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), std::mt19937_64(seed));
  std::size_t next = 0;
  for (const std::int64_t of_sequence : pages) {
    for (std::int64_t i = 0; i < order.columns; ++i) order.table.push_back(i < of_sequence ? numbers[next++] : -1);
  }
  return order;
}

CompressedPool::CompressedPool(const RowFormat& format, const RowShape& shape, const PageOrder& order,
                               std::int64_t sequences, bool head_major)
    : format_(format), shape_(shape), order_(order), head_major_(head_major) {
  for (const FormatStream& stream : format_streams(format, shape)) {
    const std::int64_t bytes = order.pages * order.page_size * stream.token_bytes(shape.dtype);
    streams_.emplace_back(static_cast<std::size_t>(bytes), std::byte{0xff});
  }
  for (const FormatTable& table : format_tables(format, shape, sequences)) {
    tables_.emplace_back(static_cast<std::size_t>(table.bytes(shape.dtype)), std::byte{0xff});
  }
}

void CompressedPool::fill(const CompressedTensor& tensor, const KvPartition& partition, std::int64_t kv_split_keys) {
  tables_ = tensor.tables;
  const CompressedCache to = view();
  const std::vector<FormatStream> streams = format_streams(format_, shape_);
  std::int64_t row = 0;
  for (std::size_t s = 0; s < tensor.lengths.size(); ++s) {
    for (std::int64_t position = 0; position < tensor.lengths[s]; ++position, ++row) {
      if (!holds_key(partition, kv_split_keys, position)) continue;
      const std::int64_t token = token_of_key(partition, kv_split_keys, position);
      const auto entry =
          s * static_cast<std::size_t>(order_.columns) + static_cast<std::size_t>(token / order_.page_size);
      const std::int64_t page = order_.table[entry];
      for (std::size_t i = 0; i < streams.size(); ++i) {
        const std::int64_t bytes = streams[i].token_bytes(shape_.dtype) / streams[i].heads;
        for (std::int64_t head = 0; head < streams[i].heads; ++head) {
          std::memcpy(to.streams[i].at(page, token % order_.page_size, head),
                      tensor.streams[i].data() + (row * streams[i].heads + head) * bytes,
                      static_cast<std::size_t>(bytes));
        }
      }
    }
  }
}

CompressedCache CompressedPool::view() {
  CompressedCache cache{format_, shape_, order_.pages, order_.page_size, {}, {}};
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format_, shape_)) {
    const std::int64_t bytes = stream.token_bytes(shape_.dtype);
    const std::int64_t row = bytes / stream.heads;
    cache.streams[at] = {streams_[at].data(), bytes * order_.page_size, head_major_ ? row : bytes,
                         head_major_ ? row * order_.page_size : row};
    ++at;
  }
  for (std::size_t i = 0; i < tables_.size(); ++i) cache.tables[i] = tables_[i].data();
  return cache;
}

}  // namespace ringattn::testing
