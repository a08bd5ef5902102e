// SPDX-License-Identifier: Apache-2.0
// Arithmetic that the attention oracles share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.hpp"
#include "base/tensor.hpp"

namespace ringattn {

// Converts one row of a view. target: [view.dim]. One loop for each dtype: load_element() decides for each element.
template <class Real>
void widen_row(const TensorView& view, std::int64_t token, std::int64_t head, Real* target) {
  const std::byte* row = view.at(token, head);
  const auto count = static_cast<std::size_t>(view.dim);
  const auto convert = [&]<class Stored>(Stored, auto to_float) {
    for (std::size_t i = 0; i < count; ++i) {
      Stored stored;
      std::memcpy(&stored, row + i * sizeof stored, sizeof stored);
      target[i] = static_cast<Real>(to_float(stored));
    }
  };
  switch (view.dtype) {
    case Dtype::kF32:
      return convert(float{}, [](float value) { return value; });
    case Dtype::kBf16:
      return convert(std::uint16_t{}, bf16_to_float);
    case Dtype::kF16:
      return convert(std::uint16_t{}, f16_to_float);
  }
}

// Unrolled, the inner loops below become vector instructions at -O2, too. Sums keep their order.
inline constexpr std::size_t kUnrolled = 8;

// Dot product with eight partial sums.
template <class Real>
Real dot(const Real* a, const Real* b, std::size_t count) {
  Real sums[kUnrolled] = {};
  std::size_t i = 0;
  for (; i + kUnrolled <= count; i += kUnrolled) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < kUnrolled; ++j) sums[j] += a[i + j] * b[i + j];
  }
  Real total = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

// sum[i] += factor · row[i]. The arrays do not overlap.
template <class Real>
void add_scaled(Real factor, const Real* row, std::size_t count, Real* __restrict sum) {
  std::size_t i = 0;
  for (; i + kUnrolled <= count; i += kUnrolled) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < kUnrolled; ++j) sum[i + j] += factor * row[i + j];
  }
  for (; i < count; ++i) sum[i] += factor * row[i];
}

}  // namespace ringattn
