// SPDX-License-Identifier: Apache-2.0
#include "ops/common/memory_shape.hpp"

#include <numeric>

namespace ringattn {

MemoryShape::MemoryShape(const void* first, std::int64_t element, std::span<const MemoryAxis> axes)
    : first_(reinterpret_cast<std::intptr_t>(first)), block_(element) {
  for (const MemoryAxis& axis : axes) {
    if (axis.length == 0) block_ = 0;
    if (axis.length > 1) axes_[count_++] = axis;
  }
  const std::span<MemoryAxis> own(axes_.data(), count_);
  std::ranges::sort(own, {}, [](const MemoryAxis& axis) { return std::abs(axis.stride); });
  std::size_t kept = 0;
  for (const MemoryAxis& axis : own) {
    if (kept == 0 && axis.stride == block_) {
      block_ *= axis.length;
    } else {
      axes_[kept++] = axis;
    }
  }
  count_ = kept;
}

MemoryShape::MemoryShape(const TensorView& view)
    : MemoryShape(
          view.data, static_cast<std::int64_t>(size_of(view.dtype)),
          std::array{MemoryAxis{view.dim, static_cast<std::int64_t>(size_of(view.dtype))},
                     MemoryAxis{view.heads, view.head_stride * static_cast<std::int64_t>(size_of(view.dtype))},
                     MemoryAxis{view.tokens, view.token_stride * static_cast<std::int64_t>(size_of(view.dtype))}}) {}

std::int64_t MemoryShape::bytes(std::size_t axes) const {
  std::int64_t bytes = block_;
  for (std::size_t i = 0; i < axes; ++i) bytes += std::abs(axes_[i].stride) * (axes_[i].length - 1);
  return bytes;
}

std::intptr_t MemoryShape::lowest(std::size_t axes) const {
  std::intptr_t lowest = first_;
  for (std::size_t i = 0; i < axes; ++i) lowest += std::min<std::int64_t>(axes_[i].stride, 0) * (axes_[i].length - 1);
  return lowest;
}

std::int64_t MemoryShape::period(std::size_t axes) const {
  std::int64_t period = 0;
  for (std::size_t i = axes; i < count_; ++i) period = std::gcd(period, axes_[i].stride);
  return period;
}

bool MemoryShape::overlaps_itself() const {
  for (std::size_t i = 0; !empty() && i < count_; ++i) {
    if (std::abs(axes_[i].stride) < bytes(i)) return true;
  }
  return false;
}

bool are_apart(const MemoryShape& a, const MemoryShape& b) {
  if (a.empty() || b.empty()) return true;
  for (std::size_t i = a.axes() + 1; i-- > 0;) {
    for (std::size_t j = b.axes() + 1; j-- > 0;) {
      const std::int64_t period = std::gcd(a.period(i), b.period(j));
      const std::int64_t distance = b.lowest(j) - a.lowest(i);
      if (period == 0) {
        if (distance >= a.bytes(i) || -distance >= b.bytes(j)) return true;
        continue;
      }
      const std::int64_t turn = (distance % period + period) % period;
      if (turn >= a.bytes(i) && turn + b.bytes(j) <= period) return true;
    }
  }
  return false;
}

}  // namespace ringattn
