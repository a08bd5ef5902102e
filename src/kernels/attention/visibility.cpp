// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/visibility.hpp"

#include <algorithm>

namespace ringattn {

namespace {

// Sum of clamp(first + i, low, high) over i in [0, count): first or last keys of consecutive queries.
double clamped_sum(std::int64_t first, std::int64_t count, std::int64_t low, std::int64_t high) {
  const std::int64_t below = std::clamp(low - first, std::int64_t{0}, count);  // queries at `low`
  const std::int64_t until = std::clamp(high - first, below, count);           // queries below `high`
  const auto ramp = static_cast<double>(until - below);
  const double ramp_sum = ramp * static_cast<double>(first + below) + ramp * (ramp - 1.0) / 2.0;
  return static_cast<double>(below) * static_cast<double>(low) + ramp_sum +
         static_cast<double>(count - until) * static_cast<double>(high);
}

}  // namespace

template <>
double Visibility::pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const {
  if (keys.empty() || rows <= 0) return 0.0;
  // A query sees its mask_range, clamped to the keys. If no key is left, both ends clamp to the same bound.
  const KeyRange first = mask_range(position);
  return clamped_sum(first.end, rows, keys.begin, keys.end) - clamped_sum(first.begin, rows, keys.begin, keys.end);
}

}  // namespace ringattn
