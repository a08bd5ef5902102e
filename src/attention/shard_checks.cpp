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

// The numbers of one head, with `inner` axes around them, innermost first.
Stretch stretch_of(const TensorView& view, std::size_t inner) {
  Stretch stretch{reinterpret_cast<std::intptr_t>(view.data),
                  view.dim * static_cast<std::int64_t>(size_of(view.dtype))};
  const auto axes = axes_of(view);
  for (const Axis& axis : std::span(axes).first(inner)) {
    const std::int64_t way = (axis.length - 1) * axis.stride;
    stretch.first += std::min<std::int64_t>(way, 0);
    stretch.bytes += std::abs(way);
  }
  return stretch;
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
    const std::int64_t distance = y.first - x.first;
    if (period == 0) {
      if (distance >= x.bytes || -distance >= y.bytes) return true;
      continue;
    }
    const std::int64_t turn = (distance % period + period) % period;
    if (turn >= x.bytes && turn + y.bytes <= period) return true;
  }
  return false;
}

}  // namespace

void check_apart(std::string_view name, const TensorView& result, std::string_view other, const TensorView& view) {
  if (are_apart(result, view)) return;
  fail(ErrorCode::kUsage, fmt::format("{} overlaps {}", name, other),
       "its rows are written while others are still read", fmt::format("Give {} memory of its own.", name));
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
