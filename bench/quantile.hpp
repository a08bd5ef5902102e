// SPDX-License-Identifier: Apache-2.0
// Quantiles of measured times.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ringattn {

// Interpolates linearly between the two nearest values. `sorted` holds at least one; `part` is in [0, 1].
inline double quantile(const std::vector<double>& sorted, double part) {
  const double at = part * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - static_cast<double>(low));
}

}  // namespace ringattn
