// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/block_score.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

namespace ringattn {

void choose_best(std::span<const std::uint32_t> orders, std::int32_t first, std::int32_t count, std::int32_t* to) {
  std::vector<std::int32_t> indices(orders.size());
  std::iota(indices.begin(), indices.end(), 0);
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const std::uint32_t x = orders[static_cast<std::size_t>(a)];
    const std::uint32_t y = orders[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const auto end = indices.begin() + count;
  if (end != indices.end()) std::nth_element(indices.begin(), end, indices.end(), before);
  std::sort(indices.begin(), end);
  std::transform(indices.begin(), end, to, [&](std::int32_t index) { return first + index; });
}

}  // namespace ringattn
