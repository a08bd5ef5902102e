// SPDX-License-Identifier: Apache-2.0
// Rotation of a token's rows in host memory, by the SIMD target in use (implemented in cpu/cpu_rope.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/rope/rope.hpp"

namespace ringattn {

// Rotates x, [head_dim], to y, which may be x itself, by the angles of its token (angle_spec()).
void rotate_row(const RowRotation& by, const float* angles, const std::byte* x, std::byte* y);

class TokenRotation {
 public:
  explicit TokenRotation(const RowRotation& by);

  // Computes cos and sin, once for all heads of a token. `axes`: as in RopeSpec; `positions`: of each axis.
  void move_to(std::span<const std::int64_t> positions, std::span<const std::uint8_t> axes, bool inverse);
  void move_to(std::int64_t position) { move_to({&position, 1}, {}, false); }
  void rotate(const std::byte* x, std::byte* y) const { rotate_row(by_, angles_.data(), x, y); }

 private:
  RowRotation by_;
  std::vector<std::int64_t> positions_;  // [pairs]
  std::vector<float> angles_, halves_;   // [2 · pairs]: as rotate_row() takes them; cos, then sin
};

}  // namespace ringattn
