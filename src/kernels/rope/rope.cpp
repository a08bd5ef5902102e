// SPDX-License-Identifier: Apache-2.0
#include "kernels/rope/rope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace ringattn {

namespace {

// Angles of positions up to ±2^31 then keep the accuracy of sin_cos().
constexpr double kMaxFrequency = 2.0;

void check_rows(const RopeSpec& spec, const char* name, const TensorView& view, const TensorView& like) {
  if (view.dtype == spec.dtype && view.tokens == like.tokens && view.heads == like.heads && view.dim == spec.head_dim) {
    return;
  }
  fail(ErrorCode::kInternal,
       fmt::format("{} of a rotation is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                   view.dim),
       fmt::format("{} [{}, {}, {}] was expected", dtype_name(spec.dtype), like.tokens, like.heads, spec.head_dim));
}

}  // namespace

int RopeSpec::axis_count() const { return axes.empty() ? 1 : 1 + *std::ranges::max_element(axes); }

RowRotation row_rotation(const RopeSpec& spec, const double* frequencies) {
  return {frequencies, spec.pair_count(), spec.head_dim, spec.attention_factor, spec.dtype, spec.pairs, spec.exact};
}

RopeSpec angle_spec(const RopeSpec& spec) {
  RopeSpec angles = spec;
  angles.dtype = Dtype::kF32;
  angles.head_dim = spec.rotary_dim;
  return angles;
}

std::vector<float> angle_basis(const RopeSpec& spec) {
  std::vector<float> basis(static_cast<std::size_t>(spec.rotary_dim));
  const bool half = spec.pairs == RopePairs::kHalfSplit;
  for (std::size_t i = 0; i < basis.size() / 2; ++i) basis[half ? i : 2 * i] = 1.0F;
  return basis;
}

std::string describe(const RopeSpec& spec) {
  std::string text = fmt::format("{}, head_dim {}", dtype_name(spec.dtype), spec.head_dim);
  if (spec.rotary_dim != spec.head_dim) text += fmt::format(", rotary_dim {}", spec.rotary_dim);
  if (spec.pairs == RopePairs::kInterleaved) text += ", interleaved";
  if (spec.exact) text += ", exact angles";
  if (!spec.axes.empty()) text += fmt::format(", {} axes of positions", spec.axis_count());
  return text;
}

void check_rope(const RopeSpec& spec) {
  if (spec.head_dim < 2 || spec.head_dim > kMaxRopeDim || spec.head_dim % 2 != 0) {
    fail(ErrorCode::kUsage, fmt::format("RoPE of heads of {}", spec.head_dim),
         fmt::format("heads have an even number of elements, at most {}", kMaxRopeDim), "Check head_dim.");
  }
  if (spec.rotary_dim < 2 || spec.rotary_dim > spec.head_dim || spec.rotary_dim % 2 != 0) {
    fail(ErrorCode::kUsage, fmt::format("rotary_dim is {}", spec.rotary_dim),
         fmt::format("it is even, and at most head_dim, {}", spec.head_dim), "Check partial_rotary_factor.");
  }
  const auto pairs = static_cast<std::size_t>(spec.pair_count());
  if (spec.frequencies.size() != pairs) {
    fail(ErrorCode::kUsage, fmt::format("RoPE has {} frequencies", spec.frequencies.size()),
         fmt::format("rotary_dim {} has {} pairs", spec.rotary_dim, pairs), "Give one for each pair.");
  }
  for (const double frequency : spec.frequencies) {
    if (frequency >= 0.0 && frequency <= kMaxFrequency &&
        (spec.exact || static_cast<double>(static_cast<float>(frequency)) == frequency)) {
      continue;
    }
    fail(ErrorCode::kUsage, fmt::format("a frequency of RoPE is {}", frequency),
         fmt::format("they lie from 0 to {}{}", kMaxFrequency, spec.exact ? "" : ", and are fp32 values"),
         "Check rope_theta and the factors.");
  }
  if (!(spec.attention_factor > 0.0F) || !std::isfinite(spec.attention_factor)) {
    fail(ErrorCode::kUsage, fmt::format("attention_factor is {}", spec.attention_factor), "it is positive and finite",
         "Check rope_parameters.");
  }
  if (spec.axes.empty()) return;
  if (spec.axes.size() != pairs || spec.axis_count() > kMaxRopeAxes) {
    fail(ErrorCode::kUsage,
         fmt::format("{} pairs have axes of positions, up to axis {}", spec.axes.size(), spec.axis_count() - 1),
         fmt::format("there are {} pairs, and at most {} axes", pairs, kMaxRopeAxes), "Check mrope_section.");
  }
}

void check_rope_task(const RopeSpec& spec, const RopeTask& task) {
  if (task.tensors.empty() || task.tensors.size() > kMaxRopeTensors) {
    fail(ErrorCode::kInternal, fmt::format("a rotation of {} tensors", task.tensors.size()),
         fmt::format("there are 1 to {}", kMaxRopeTensors));
  }
  for (const RopeTensor& tensor : task.tensors) {
    TensorView like = tensor.x;
    like.tokens = task.tensors.front().x.tokens;
    check_rows(spec, "x", tensor.x, like);
    check_rows(spec, "y", tensor.y, like);
  }
}

}  // namespace ringattn
