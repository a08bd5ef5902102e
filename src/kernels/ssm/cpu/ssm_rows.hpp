// SPDX-License-Identifier: Apache-2.0
// Converts rows of an SSM task's tensors to fp32 and back.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/rope/token_rotation.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::cpu {

inline constexpr float kLog2E = 1.44269504F;

inline float element_at(const TensorView& view, std::int64_t row, std::int64_t head) {
  return load_element(view.at(row, head), view.dtype);
}

// Converts all view.dim elements of a head.
inline void load_elements(const TensorView& view, std::int64_t row, std::int64_t head, float* target) {
  const std::byte* const source = view.at(row, head);
  for (std::int64_t i = 0; i < view.dim; ++i) {
    target[i] = load_element(source + i * static_cast<std::int64_t>(size_of(view.dtype)), view.dtype);
  }
}

// Converts `count` contiguous elements to fp32; a multiple of 8.
inline void widen_row(const TileOps& ops, const TensorView& view, std::int64_t row, std::int64_t head, int count,
                      float* target) {
  ops.widen(view.at(row, head), view.dtype, count, target);
}

// Loads rows of B and C: converts them to fp32, after RoPE if the task has one.
class BcRows {
 public:
  BcRows(const TileOps& ops, const SsmSpec& spec, const RopeAngles& angles) : ops_(ops), spec_(spec), angles_(angles) {
    if (angles.values == nullptr) return;
    RowRotation by;
    by.pairs = angles.pairs;
    by.head_dim = spec.state_dim;
    by.dtype = spec.dtype;
    by.layout = angles.layout;
    rotation_.emplace(by);
    rotated_.resize(static_cast<std::size_t>(spec.state_dim) * size_of(spec.dtype));
  }

  void load(const TensorView& view, std::int64_t row, int group, float* target) {
    if (!rotation_) return widen_row(ops_, view, row, group, spec_.state_dim, target);
    if (row != angles_row_) rotation_->take_angles(angles_.values + row * 2 * angles_.pairs);
    angles_row_ = row;
    rotation_->rotate(view.at(row, group), rotated_.data());
    ops_.widen(rotated_.data(), spec_.dtype, spec_.state_dim, target);
  }

 private:
  const TileOps& ops_;
  const SsmSpec& spec_;
  RopeAngles angles_;
  std::optional<TokenRotation> rotation_;
  std::int64_t angles_row_ = -1;    // whose angles rotation_ has
  std::vector<std::byte> rotated_;  // a row
};

// A scale of 1 changes no bits.
inline void scale_row(float scale, int count, float* values) {
  for (int i = 0; i < count; ++i) values[i] *= scale;
}

// Converts fp32 to `dtype`, rounded to nearest even.
inline void narrow_row(const float* values, int count, Dtype dtype, std::byte* target) {
  if (dtype == Dtype::kBf16) {
    auto* const bits = reinterpret_cast<std::uint16_t*>(target);
    for (int i = 0; i < count; ++i) bits[i] = float_to_bf16(values[i]);
    return;
  }
  for (int i = 0; i < count; ++i)
    store_element(target + static_cast<std::size_t>(i) * size_of(dtype), dtype, values[i]);
}

}  // namespace ringattn::cpu
