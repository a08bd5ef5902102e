// SPDX-License-Identifier: Apache-2.0
#include "attention/shard_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <span>

#include "base/error.hpp"

namespace ringattn {

namespace {

// Bytes from the lowest one that a part of a tensor has.
struct Stretch {
  std::intptr_t first = 0;
  std::int64_t bytes = 0;
};

struct Axis {
  std::int64_t length = 0;
  std::int64_t stride = 0;  // bytes
};

std::array<Axis, 2> axes_of(const TensorView& view) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  // The stride of an axis without a step may be any.
  const auto axis = [&](std::int64_t length, std::int64_t stride) {
    return Axis{length, length > 1 ? stride * element : 0};
  };
  return {axis(view.heads, view.head_stride), axis(view.tokens, view.token_stride)};
}

// Of `bytes` bytes, with axes around them.
Stretch stretch_over(const void* data, std::int64_t bytes, std::span<const Axis> axes) {
  Stretch stretch{reinterpret_cast<std::intptr_t>(data), bytes};
  for (const Axis& axis : axes) {
    const std::int64_t way = (axis.length - 1) * axis.stride;
    stretch.first += std::min<std::int64_t>(way, 0);
    stretch.bytes += std::abs(way);
  }
  return stretch;
}

// The numbers of one head, with `inner` axes around them, innermost first.
Stretch stretch_of(const TensorView& view, std::size_t inner) {
  const auto axes = axes_of(view);
  return stretch_over(view.data, view.dim * static_cast<std::int64_t>(size_of(view.dtype)),
                      std::span(axes).first(inner));
}

Stretch stretch_of(const CacheView& cache) {
  const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
  const std::array<Axis, 3> axes{{{cache.heads, cache.head_stride * element},
                                  {cache.page_size, cache.token_stride * element},
                                  {cache.pages, cache.page_stride * element}}};
  return stretch_over(cache.data, cache.dim * element, axes);
}

bool are_apart(const Stretch& x, const Stretch& y) {
  return y.first - x.first >= x.bytes || x.first - y.first >= y.bytes;
}

// What all strides of the axes around `inner` ones are multiples of; 0 where there are no steps.
std::int64_t period_of(const TensorView& view, std::size_t inner) {
  std::int64_t period = 0;
  const auto axes = axes_of(view);
  for (const Axis& axis : std::span(axes).subspan(inner)) {
    if (axis.length > 1) period = std::gcd(period, axis.stride);
  }
  return period;
}

// Whether no byte can be both tensors': as whole stretches, or because their rows, or heads, take turns.
bool are_apart(const TensorView& a, const TensorView& b) {
  if (a.tokens * a.heads * a.dim == 0 || b.tokens * b.heads * b.dim == 0) return true;
  for (const std::size_t inner : {2U, 1U, 0U}) {
    const Stretch x = stretch_of(a, inner), y = stretch_of(b, inner);
    const std::int64_t period = std::gcd(period_of(a, inner), period_of(b, inner));
    if (period == 0) {
      if (are_apart(x, y)) return true;
      continue;
    }
    const std::int64_t turn = ((y.first - x.first) % period + period) % period;
    if (turn >= x.bytes && turn + y.bytes <= period) return true;
  }
  return false;
}

[[noreturn]] void refuse_overlap(std::string_view name, std::string_view other) {
  fail(ErrorCode::kUsage, fmt::format("{} overlaps {}", name, other),
       "its rows are written while others are still read", fmt::format("Give {} memory of its own.", name));
}

}  // namespace

void check_apart(std::string_view name, const TensorView& result, std::string_view other, const TensorView& view) {
  if (!are_apart(result, view)) refuse_overlap(name, other);
}

void check_apart(std::string_view name, const TensorView& result, std::string_view other, const CacheView& cache) {
  if (result.tokens * result.heads * result.dim == 0) return;
  if (cache.pages * cache.page_size * cache.heads * cache.dim == 0) return;
  if (!are_apart(stretch_of(result, 2), stretch_of(cache))) refuse_overlap(name, other);
}

void check_shard(std::string_view door, std::string_view name, const TensorView& view, const ShardShape& expected) {
  if (view.dtype == expected.dtype && view.tokens == expected.tokens && view.heads == expected.heads &&
      view.dim == expected.dim) {
    return;
  }
  fail(ErrorCode::kUsage,
       fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
       fmt::format("this rank's share of the job is {} [{}, {}, {}]", dtype_name(expected.dtype), expected.tokens,
                   expected.heads, expected.dim),
       fmt::format("Rows follow {}::layout().", door));
}

void check_given(std::string_view door, std::string_view name, const void* data, bool wanted) {
  if ((data != nullptr) == wanted) return;
  fail(ErrorCode::kUsage, fmt::format("{} {}", name, wanted ? "is missing" : "is given"),
       wanted ? "the job has it, and this rank a part in it" : "the job has none for this rank",
       fmt::format("{0}Spec and {0}Job say what there is.", door));
}

void check_sinks(std::string_view spec, const float* sinks, bool wanted) {
  if ((sinks != nullptr) == wanted) return;
  fail(ErrorCode::kUsage, wanted ? "sinks are missing" : "sinks are given",
       wanted ? "the job has them" : "the job has none", fmt::format("{}::sinks says whether a job has sinks.", spec));
}

}  // namespace ringattn
