// SPDX-License-Identifier: Apache-2.0
// Compressed caches in a GPU's memory, the kernels that decode over them, and the formats that these read.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {

using DecodeRow = KernelRow<DecodeSpec>;

inline const RowFormat kFp8{RowEncoding::kFp8};
inline const RowFormat kInt8{RowEncoding::kInt8};
inline const RowFormat kKeys32{RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 32};
inline const RowFormat kKeys64{RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 64};
inline const RowFormat kValues{RowEncoding::kInt4Token, ScaleGrain::kTokenHead, 32};

// The GPU kernels that can run here and read such a cache.
inline std::vector<const DecodeRow*> rows_here(const DecodeSpec& spec) {
  std::vector<const DecodeRow*> rows;
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    if (row.backend == "cuda" && row.unavailable().empty() && row.missing(spec).empty()) rows.push_back(&row);
  }
  return rows;
}

template <class Number>
std::vector<std::byte> bytes_of(const std::vector<Number>& numbers) {
  std::vector<std::byte> bytes(numbers.size() * sizeof(Number));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// A copy of a host pool in a backend's memory.
class DevicePool {
 public:
  DevicePool(Backend& backend, const CompressedCache& host, std::int64_t sequences) : view_(host) {
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(host.format, host.shape)) {
      const auto bytes = static_cast<std::size_t>(host.pages * host.page_size * stream.token_bytes(host.shape.dtype));
      view_.streams[at].data = place(backend, host.streams[at].data, bytes);
      ++at;
    }
    at = 0;
    for (const FormatTable& table : format_tables(host.format, host.shape, sequences)) {
      view_.tables[at] = place(backend, host.tables[at], static_cast<std::size_t>(table.bytes(host.shape.dtype)));
      ++at;
    }
  }

  const CompressedCache& view() const { return view_; }
  CacheView plain() const {
    const RowShape& shape = view_.shape;
    const PagedStream& rows = view_.streams[0];
    const auto element = static_cast<std::int64_t>(size_of(shape.dtype));
    return {rows.data,
            shape.dtype,
            view_.pages,
            view_.page_size,
            shape.heads,
            shape.dim,
            rows.page_stride / element,
            rows.token_stride / element,
            rows.head_stride / element};
  }

 private:
  std::byte* place(Backend& backend, const std::byte* data, std::size_t bytes) {
    memory_.emplace_back(backend, bytes);
    memory_.back().write(std::vector<std::byte>(data, data + bytes));
    return memory_.back().data();
  }

  CompressedCache view_;
  std::vector<DeviceArray> memory_;
};

inline DecodeSpec usual_compressed_spec(const CacheFormat& format) {
  DecodeSpec spec;
  spec.attention = make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0});
  spec.format = format;
  return spec;
}

}  // namespace ringattn::testing

#define RINGATTN_NEEDS_COMPRESSED_DECODER()                      \
  if (rows_here(usual_compressed_spec({kFp8, kFp8})).empty())    \
  GTEST_SKIP() << "needs a GPU with a kernel that decodes such " \
                  "caches"
