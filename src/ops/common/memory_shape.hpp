// SPDX-License-Identifier: Apache-2.0
// The set of bytes of a strided tensor. Used to check that outputs overlap neither inputs nor themselves.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "base/tensor.hpp"

namespace ringattn {

struct MemoryAxis {
  std::int64_t length = 1;
  std::int64_t stride = 0;  // bytes
};

// A range of contiguous bytes, repeated along axes.
class MemoryShape {
 public:
  static constexpr std::size_t kMaxAxes = 8;

  // Elements of `element` bytes along `axes`, at most kMaxAxes in any order. With an axis of length 0 it is empty.
  MemoryShape(const void* first, std::int64_t element, std::span<const MemoryAxis> axes);
  explicit MemoryShape(const TensorView& view);

  bool empty() const { return block_ == 0; }
  // Size and lowest address of the range spanned by the block and the innermost `axes`.
  std::int64_t bytes(std::size_t axes) const;
  std::intptr_t lowest(std::size_t axes) const;
  // The greatest common divisor of the strides of all axes outside of the innermost `axes`; 0 if there are none.
  std::int64_t period(std::size_t axes) const;
  std::size_t axes() const { return count_; }
  // True if two elements have the same address, as in an expanded tensor. Also true if the blocks of an axis neither
  // follow each other nor lie within one stride of the next axis.
  bool overlaps_itself() const;

 private:
  std::intptr_t first_ = 0;
  std::int64_t block_ = 0;                   // bytes
  std::array<MemoryAxis, kMaxAxes> axes_{};  // [count_], of two or more elements, by ascending stride
  std::size_t count_ = 0;
};

// True if no byte can belong to both tensors: they occupy separate ranges, or their rows or heads interleave in one
// range, as the columns of a fused projection do.
bool are_apart(const MemoryShape& a, const MemoryShape& b);

}  // namespace ringattn
