// SPDX-License-Identifier: Apache-2.0
// Non-owning views of tensors. The innermost axis is contiguous and every other stride is free, so a slice of a fused
// QKV tensor is a view. Strides count elements, and all indexing is 64-bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn {

// [tokens, heads, dim], read-only.
struct TensorView {
  const void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  const std::byte* at(std::int64_t token, std::int64_t head) const {
    return static_cast<const std::byte*>(data) +
           (token * token_stride + head * head_stride) * static_cast<std::int64_t>(size_of(dtype));
  }
  // True if the tensor is one contiguous [tokens, heads, dim] array.
  bool is_dense() const { return head_stride == dim && token_stride == heads * dim; }
};

// [tokens, heads, dim], writable.
struct MutableTensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* at(std::int64_t token, std::int64_t head) const {
    return static_cast<std::byte*>(data) +
           (token * token_stride + head * head_stride) * static_cast<std::int64_t>(size_of(dtype));
  }
  operator TensorView() const { return {data, dtype, tokens, heads, dim, token_stride, head_stride}; }
};

// One fp32 value for each (token, head): LSE, row maxima or row sums. Strides count elements.
struct RowView {
  float* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  float& at(std::int64_t token, std::int64_t head) const { return data[token * token_stride + head * head_stride]; }
};

// A dense [tokens, heads, dim] view of `data`.
inline TensorView dense_view(const void* data, Dtype dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  return {data, dtype, tokens, heads, dim, heads * dim, dim};
}
inline MutableTensorView dense_view(void* data, Dtype dtype, std::int64_t tokens, std::int64_t heads,
                                    std::int64_t dim) {
  return {data, dtype, tokens, heads, dim, heads * dim, dim};
}

}  // namespace ringattn
