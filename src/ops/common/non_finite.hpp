// SPDX-License-Identifier: Apache-2.0
// Counts NaN and infinite values of an input. They are valid data, but the user should know of them. Ranks that have
// the same values count them once, so that the sum over the ranks is the input's number.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"

namespace ringattn {

struct NonFinite {
  std::int64_t q = 0;
  std::int64_t k = 0;  // or of latents and rotary keys
  std::int64_t v = 0;  // or of the matrices that expand latents
  // Inputs of gradients:
  std::int64_t out = 0;   // out of the forward
  std::int64_t lse = 0;   // NaN or +∞; −∞ is the LSE of a row without keys
  std::int64_t dout = 0;  // and the gradient of LSE

  std::int64_t total() const { return q + k + v + out + lse + dout; }
  NonFinite& operator+=(const NonFinite& other) {
    q += other.q;
    k += other.k;
    v += other.v;
    out += other.out;
    lse += other.lse;
    dout += other.dout;
    return *this;
  }
};

// Counts NaN and infinite values of rows in host memory whose dims are contiguous.
std::int64_t count_non_finite(const TensorView& view);

}  // namespace ringattn
