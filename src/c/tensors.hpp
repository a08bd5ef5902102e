// SPDX-License-Identifier: Apache-2.0
// Converts DLPack tensors to views. All functions throw kUsage if a tensor has another type, number of axes or device,
// or if its innermost axis is not contiguous. The message names the tensor and the expected value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/tensor.hpp"
#include "c/ringattn.h"
#include "comm/transport.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/rope/rope.hpp"
#include "ops/common/memory_shape.hpp"

namespace ringattn::c {

// The element type. Throws kUsage for unsupported types.
Dtype read_dtype(const DLDataType& type);

// Address and strides of a part of a compressed tensor.
struct Part {
  std::byte* data = nullptr;
  std::array<std::int64_t, 4> lengths{};  // [axes]
  std::array<std::int64_t, 4> strides{};  // [axes], bytes
};

// Reads tensors of one memory: host memory, or the device with the given index.
class TensorReader {
 public:
  explicit TensorReader(const Transport& transport) : TensorReader(transport.memory(), transport.device()) {}
  explicit TensorReader(MemoryKind memory, int device = 0) : memory_(memory), device_(device) {}

  MemoryKind memory() const { return memory_; }

  // [rows, heads, dim]; an empty view for NULL.
  MutableTensorView rows(const char* name, const DLTensor* tensor) const;
  // [rows, heads] fp32, any strides; an empty view for NULL. Throws for other `rows` or `heads`.
  RowView row_values(const char* name, const DLTensor* tensor, std::int64_t rows, std::int64_t heads) const;
  // [pages, page_size, heads, dim]; an empty view for NULL.
  MutableCacheView cache(const char* name, const DLTensor* tensor) const;
  // [heads, dim_n, dim_k]; one of the last two strides is 1; an empty view for NULL.
  GemmWeights matrices(const char* name, const DLTensor* tensor) const;
  // Dense fp32 of exactly this shape; null for NULL.
  float* numbers(const char* name, const DLTensor* tensor, std::span<const std::int64_t> shape) const;
  // Dense int32 [count]; null for NULL.
  std::int32_t* integers(const char* name, const DLTensor* tensor, std::int64_t count) const;
  // int32 or int64 [rows], or [axes, rows] with contiguous rows; no values for NULL. Throws for other `rows` or `axes`.
  RopePositions positions(const char* name, const DLTensor* tensor, std::int64_t rows, int axes) const;
  // Dense int32 [count] of slot indices; null for NULL. Negative: padding. In host memory checks that entries are below
  // `slots` and distinct.
  std::int32_t* slots(const char* name, const DLTensor* tensor, std::int64_t count, std::int64_t slots) const;
  // int32 [sequences, pages] with contiguous rows; no pages for NULL. `pages` receives the number of columns.
  BlockTable table(const char* name, const DLTensor* tensor, std::int64_t sequences, std::int64_t& pages) const;
  // A part of a compressed tensor with one of these types and exactly this shape, where -1 accepts any length. The
  // innermost axis is contiguous; with `dense` all axes are. Throws kUsage for NULL, too.
  Part part(const char* name, const DLTensor* tensor, std::span<const DLDataType> types,
            std::span<const std::int64_t> shape, bool dense) const;
  // For outputs, called after all tensors were read. Throws kUsage if rows of the named tensor, if it was read, overlap
  // each other or another tensor. `in_place` may be the same tensor.
  void check_written(std::string_view name, std::string_view in_place = {}) const;
  // All bytes of a dense tensor of any type; empty for NULL.
  std::span<std::byte> bytes(const char* name, const DLTensor* tensor) const;

 private:
  // Address of the first element. Checks the rules for all tensors.
  std::byte* data(const char* name, const DLTensor& tensor, int axes) const;

  void note(const char* name, const DLTensor& tensor, const std::byte* first) const;

  MemoryKind memory_;
  int device_;
  // A tensor that was read and has elements.
  struct Read {
    std::array<char, 24> name{};       // a copy, because names of compressed parts are temporary
    const DLTensor* tensor = nullptr;  // null: its strides exceed the address range
    const std::byte* first = nullptr;
    std::intptr_t begin = 0, end = 0;  // range of all its bytes

    std::string_view text() const { return name.data(); }
    MemoryShape shape() const;
  };
  static constexpr std::size_t kMaxRead = 40;
  mutable std::array<Read, kMaxRead> read_;
  mutable std::size_t read_count_ = 0;
};

}  // namespace ringattn::c
