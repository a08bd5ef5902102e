// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/cuda/row_launch.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn::cuda {

namespace {

DeviceRows device_rows(const TensorView& view) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  return {const_cast<std::byte*>(static_cast<const std::byte*>(view.data)), view.token_stride * element,
          view.head_stride * element};
}

bool divides(std::int64_t bytes, const DeviceRows& rows) {
  return (static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(rows.data)) | rows.token_stride |
          rows.head_stride) %
             bytes ==
         0;
}

}  // namespace

void check_quantizable(const RowShape& shape) {
  if (shape.dim <= kMaxRowDim) return;
  fail(ErrorCode::kUnsupported, fmt::format("rows of {} channels", shape.dim),
       fmt::format("GPUs quantize rows of up to {}", kMaxRowDim), "Quantize them on the host.");
}

RowParams row_params(const RowFormat& format, const RowShape& shape, const CompressedRows& rows,
                     const TensorView& plain, const TensorView& products, InvalidElementCell* invalid) {
  RowParams p;
  p.format = format;
  p.bf16 = shape.dtype == Dtype::kBf16;
  p.heads = static_cast<int>(shape.heads);
  p.dim = static_cast<int>(shape.dim);
  for (int i = 0; i < kMaxStreams; ++i) {
    const StreamView& stream = rows.streams[static_cast<std::size_t>(i)];
    p.streams[i] = {stream.data, stream.token_stride, stream.head_stride};
  }
  std::ranges::copy(rows.tables, p.tables);
  p.plain = device_rows(plain);
  if (products.data != nullptr) p.products = device_rows(products);
  p.invalid = invalid;
  p.by_four = allows_4_channels(p, {});
  return p;
}

bool allows_4_channels(const RowParams& p, std::span<const std::int64_t> page_strides) {
  const RowShape shape{p.bf16 ? Dtype::kBf16 : Dtype::kF16, p.heads, p.dim};
  const auto tail = p.format.encoding == RowEncoding::kInt4Channel
                        ? static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(p.tables[0]))
                        : 0;
  if (p.dim % 4 != 0 || tail % 8 != 0 || !divides(8, p.plain) || !divides(8, p.products)) return false;
  int at = 0;
  for (const FormatStream& stream : format_streams(p.format, shape)) {
    // Bytes of four elements or quantized values, of a scale, or of a scale and zero point.
    const std::int64_t bytes = p.format.is_plain()                         ? 8
                               : stream.name == "rotary"                   ? 8
                               : stream.type != StoredType::kU8            ? 4
                               : p.format.encoding == RowEncoding::kVector ? 1
                                                                           : 2;
    const bool pages = page_strides.empty() || page_strides[static_cast<std::size_t>(at)] % bytes == 0;
    if (stream.name != "factors" && stream.name != "outliers" && (!divides(bytes, p.streams[at]) || !pages)) {
      return false;
    }
    ++at;
  }
  return true;
}

bool allows_16_channels(const RowParams& p) {
  const bool has_lanes = p.dim == 64 || p.dim == 128 || p.dim == 256;
  return p.by_four && has_lanes && divides(16, p.plain) &&
         divides(p.format.encoding == RowEncoding::kInt4Token ? 8 : 16, p.streams[0]);
}

}  // namespace ringattn::cuda
