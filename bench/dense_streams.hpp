// SPDX-License-Identifier: Apache-2.0
// Memory of compressed rows as the benchmarks lay it out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// Dense streams stored consecutively from `data` on, `rows` rows each, aligned to 256 bytes.
struct DenseStreams {
  std::array<StreamView, kMaxStreams> streams;
  std::size_t bytes = 0;
};

inline DenseStreams dense_streams(std::byte* data, const RowFormat& format, const RowShape& shape, std::int64_t rows) {
  DenseStreams dense;
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    const std::int64_t token = stream.token_bytes(shape.dtype);
    dense.streams[at++] = {data == nullptr ? nullptr : data + dense.bytes, token, token / stream.heads};
    dense.bytes += (static_cast<std::size_t>(rows * token) + 255) / 256 * 256;
  }
  return dense;
}

}  // namespace ringattn
