// SPDX-License-Identifier: Apache-2.0
// DLPack's tensors as the library's views. Every function throws kUsage, naming the tensor and what it should have
// been, where a tensor has another type, number of axes or device, or where its innermost axis is not contiguous.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "attention/memory_shape.hpp"
#include "base/tensor.hpp"
#include "c/ringattn.h"
#include "comm/transport.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/cache_partition.hpp"
#include "kernels/decode.hpp"

namespace ringattn::c {

// The element type; throws kUsage for those that ringattn doesn't compute with.
Dtype read_dtype(const DLDataType& type);

// Where the numbers of a part of a compressed tensor lie.
struct Part {
  std::byte* data = nullptr;
  std::array<std::int64_t, 4> lengths{};  // of axes
  std::array<std::int64_t, 4> strides{};  // of axes, in bytes
};

// Reads tensors that lie in one kind of memory: on a device, which then has this number, or on the host.
class TensorReader {
 public:
  explicit TensorReader(const Transport& transport) : TensorReader(transport.memory(), transport.device()) {}
  explicit TensorReader(MemoryKind memory, int device = 0) : memory_(memory), device_(device) {}

  MemoryKind memory() const { return memory_; }

  // [rows, heads, dim]; an empty view for NULL.
  MutableTensorView rows(const char* name, const DLTensor* tensor) const;
  // [rows, heads] fp32 of any strides; an empty view for NULL. `rows` and `heads` are what it must have.
  RowView row_values(const char* name, const DLTensor* tensor, std::int64_t rows, std::int64_t heads) const;
  // [pages, page_size, heads, dim]; an empty view for NULL.
  MutableCacheView cache(const char* name, const DLTensor* tensor) const;
  // [heads, dim_n, dim_k], one of the two dim_k strides 1; an empty view for NULL.
  GemmWeights matrices(const char* name, const DLTensor* tensor) const;
  // Dense fp32 numbers of exactly this shape; null for NULL.
  float* numbers(const char* name, const DLTensor* tensor, std::span<const std::int64_t> shape) const;
  // Dense int32 [count]; null for NULL.
  std::int32_t* integers(const char* name, const DLTensor* tensor, std::int64_t count) const;
  // The same, of numbers of slots: -1 and below for none, else, in host memory, each below `slots` and there once.
  std::int32_t* slots(const char* name, const DLTensor* tensor, std::int64_t count, std::int64_t slots) const;
  // int32 [sequences, pages] whose rows are contiguous; without pages for NULL. `pages` receives the number of columns.
  BlockTable table(const char* name, const DLTensor* tensor, std::int64_t sequences, std::int64_t& pages) const;
  // A part of a compressed tensor: elements of one of these types, of exactly this shape, -1 standing for any length.
  // The innermost axis is contiguous, of a `dense` one all are. Throws kUsage for NULL, too.
  Part part(const char* name, const DLTensor* tensor, std::span<const DLDataType> types,
            std::span<const std::int64_t> shape, bool dense) const;
  // Throws kUsage where rows of the tensor of this name, if it was read, overlap each other or another tensor that was
  // read, but for `in_place`, which may be the same one. For what a call writes; called when all tensors were read.
  void check_written(std::string_view name, std::string_view in_place = {}) const;
  // All bytes of a dense tensor of any type; empty for NULL.
  std::span<std::byte> bytes(const char* name, const DLTensor* tensor) const;

 private:
  // Where the first element lies. Checks what holds for all tensors.
  std::byte* data(const char* name, const DLTensor& tensor, int axes) const;

  void note(const char* name, const DLTensor& tensor, const std::byte* first) const;

  MemoryKind memory_;
  int device_;
  // What was read, of tensors with elements.
  struct Read {
    std::array<char, 24> name{};       // names of compressed parts are temporary
    const DLTensor* tensor = nullptr;  // null: its strides lead out of memory
    const std::byte* first = nullptr;
    std::intptr_t begin = 0, end = 0;  // of all its bytes

    std::string_view text() const { return name.data(); }
    MemoryShape shape() const;
  };
  static constexpr std::size_t kMaxRead = 40;
  mutable std::array<Read, kMaxRead> read_;
  mutable std::size_t read_count_ = 0;
};

}  // namespace ringattn::c
