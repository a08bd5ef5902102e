// SPDX-License-Identifier: Apache-2.0
#include "kernels/rope/rope_oracle.hpp"

#include <algorithm>
#include <cmath>

namespace ringattn {

void rope_oracle(const RopeSpec& spec, std::span<const std::int64_t> positions, bool inverse, std::span<const float> x,
                 std::span<double> y, std::span<double> allowed) {
  const bool half = spec.pairs == RopePairs::kHalfSplit;
  const double step = spec.dtype == Dtype::kBf16 ? 0x1p-8 : spec.dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
  const double smallest = spec.dtype == Dtype::kF16 ? 0x1p-25 : 0x1p-149;  // half of the smallest subnormal, or more
  std::ranges::copy(x, y.begin());
  std::ranges::fill(allowed, 0.0);
  for (std::size_t i = 0; i < spec.frequencies.size(); ++i) {
    const std::size_t a = half ? i : 2 * i;
    const std::size_t b = half ? i + spec.frequencies.size() : 2 * i + 1;
    const auto position = static_cast<double>(positions[spec.axes.empty() ? 0 : spec.axes[i]]);
    double angle = position * spec.frequencies[i];
    if (!spec.exact) angle = static_cast<float>(static_cast<float>(position) * static_cast<float>(spec.frequencies[i]));
    const double cos = std::cos(angle) * spec.attention_factor;
    const double sin = (inverse ? -std::sin(angle) : std::sin(angle)) * spec.attention_factor;
    y[a] = x[a] * cos - x[b] * sin;
    y[b] = x[b] * cos + x[a] * sin;
    // cos and sin are rounded, the factor, both products and their sum: up to 4 roundings of 2^-24 in each term.
    const double terms = spec.attention_factor * (std::abs(double{x[a]}) + std::abs(double{x[b]}));
    for (const std::size_t d : {a, b}) allowed[d] = 4 * 0x1p-24 * terms + step * std::abs(y[d]) + smallest;
  }
}

}  // namespace ringattn
