// SPDX-License-Identifier: Apache-2.0
// Rows of [rows, heads, dims] in the kernel's memory, dense or apart, for runners of SSM kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/tensor.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {

// An array of floats in the kernel's memory, of at least one byte.
inline DeviceArray uploaded(Backend& backend, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  DeviceArray array(backend, std::max<std::size_t>(1, bytes.size()));
  if (!bytes.empty()) array.write(bytes);
  return array;
}

// Half of the spacing at `value`, at most. fp16's smallest numbers lie 2^−24 apart.
inline double output_rounding(Dtype dtype, double value) {
  const double part = dtype == Dtype::kF32 ? 0x1p-24 : dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
  return std::max(part * std::fabs(value), dtype == Dtype::kF16 ? 0x1p-25 : 0.0);
}

// Elements between rows are NaN. `strided`: there are eight of them. `unaligned`: there is one, and the first row
// begins at the second element, so that only every eighth row of a 16-bit type begins at a multiple of 16 bytes.
class PlacedRows {
 public:
  PlacedRows(Backend& backend, Dtype dtype, std::int64_t rows, int heads, int dims, bool strided, bool unaligned)
      : dtype_(dtype),
        rows_(rows),
        heads_(heads),
        dims_(dims),
        stride_(heads * dims + (unaligned ? 1
                                : strided ? 8
                                          : 0)),
        offset_(unaligned ? size_of(dtype) : 0),
        array_(backend, offset_ + std::max<std::size_t>(1, size(rows * stride_) * size_of(dtype))) {}

  MutableTensorView view() const { return {array_.data() + offset_, dtype_, rows_, heads_, dims_, stride_, dims_}; }

  // Row i of `packed` goes to row order[i].
  void write(const std::vector<std::byte>& packed, const std::vector<std::int64_t>& order) {
    std::vector<std::byte> bytes(offset_ + size(rows_ * stride_) * size_of(dtype_), std::byte{0xff});
    for (std::size_t i = 0; i < order.size() && !packed.empty(); ++i) {
      std::memcpy(bytes.data() + offset_ + size(order[i]) * stride_bytes(), packed.data() + i * row_bytes(),
                  row_bytes());
    }
    if (!bytes.empty()) array_.write(bytes);
  }
  std::vector<std::byte> read(const std::vector<std::int64_t>& order) const {
    const std::vector<std::byte> bytes = array_.read();
    std::vector<std::byte> packed(order.size() * row_bytes());
    for (std::size_t i = 0; i < order.size(); ++i) {
      std::memcpy(packed.data() + i * row_bytes(), bytes.data() + offset_ + size(order[i]) * stride_bytes(),
                  row_bytes());
    }
    return packed;
  }

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::size_t row_bytes() const { return size(heads_ * dims_) * size_of(dtype_); }
  std::size_t stride_bytes() const { return size(stride_) * size_of(dtype_); }

  Dtype dtype_;
  std::int64_t rows_;
  std::int64_t heads_;
  std::int64_t dims_;
  std::int64_t stride_;
  std::size_t offset_;
  DeviceArray array_;
};

}  // namespace ringattn::testing
