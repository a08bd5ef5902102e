// SPDX-License-Identifier: Apache-2.0
// Which bytes a strided tensor has: whether it shares some with another one, or its own rows share some.
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

// A block of contiguous bytes, repeated along axes.
class MemoryShape {
 public:
  static constexpr std::size_t kMaxAxes = 8;

  // Elements of so many bytes along `axes`, at most kMaxAxes in any order. An axis of length 0: there are no bytes.
  MemoryShape(const void* first, std::int64_t element, std::span<const MemoryAxis> axes);
  explicit MemoryShape(const TensorView& view);

  bool empty() const { return block_ == 0; }
  // Bytes of the block and the innermost `axes` of them, from the lowest address on.
  std::int64_t bytes(std::size_t axes) const;
  std::intptr_t lowest(std::size_t axes) const;
  // What all strides of the axes outside of the innermost `axes` are multiples of; 0 where there are none.
  std::int64_t period(std::size_t axes) const;
  std::size_t axes() const { return count_; }
  // Whether two elements have the same place, as those of an expanded tensor do. Also true where an axis' blocks
  // neither follow each other nor lie inside of one step of the next axis.
  bool overlaps_itself() const;

 private:
  std::intptr_t first_ = 0;
  std::int64_t block_ = 0;                   // bytes
  std::array<MemoryAxis, kMaxAxes> axes_{};  // [count_], of two or more steps, by ascending stride
  std::size_t count_ = 0;
};

// Whether no byte can be both tensors': as whole stretches, or because their rows or heads take turns in one stretch of
// memory, as columns of a fused projection do.
bool are_apart(const MemoryShape& a, const MemoryShape& b);

}  // namespace ringattn
