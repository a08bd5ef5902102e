// SPDX-License-Identifier: Apache-2.0
#include "ops/common/non_finite.hpp"

#include <cmath>

namespace ringattn {

namespace {

std::int64_t count_values(const void* data, Dtype dtype, std::int64_t values) {
  std::int64_t count = 0;
  if (dtype == Dtype::kF32) {
    const auto* floats = static_cast<const float*>(data);
    for (std::int64_t i = 0; i < values; ++i) count += std::isfinite(floats[i]) ? 0 : 1;
    return count;
  }
  const unsigned exponent = exponent_bits(dtype);
  const auto* words = static_cast<const std::uint16_t*>(data);
  for (std::int64_t i = 0; i < values; ++i) count += (words[i] & exponent) == exponent ? 1 : 0;
  return count;
}

}  // namespace

std::int64_t count_non_finite(const TensorView& view) {
  if (view.is_dense()) return count_values(view.data, view.dtype, view.tokens * view.heads * view.dim);
  std::int64_t count = 0;
  for (std::int64_t token = 0; token < view.tokens; ++token) {
    for (std::int64_t head = 0; head < view.heads; ++head) {
      count += count_values(view.at(token, head), view.dtype, view.dim);
    }
  }
  return count;
}

}  // namespace ringattn
