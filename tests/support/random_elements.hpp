// SPDX-License-Identifier: Apache-2.0
// Fast random elements of tensors. Slower ones took half of the time of decode tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/dtype.hpp"

namespace ringattn::testing {

// About normal: sums of four uniform numbers, so at most 3.46 deviations from their mean. Tests that want larger ones
// plant them.
class Normal {
 public:
  explicit Normal(float mean = 0.0F, float deviation = 1.0F) : mean_(mean), step_(deviation / 37837.2F) {}

  float operator()(std::mt19937_64& random) const {
    constexpr std::uint64_t kLow = 0xffff;
    const std::uint64_t bits = random();
    const std::uint64_t sum = (bits & kLow) + (bits >> 16 & kLow) + (bits >> 32 & kLow) + (bits >> 48);
    return mean_ + step_ * (static_cast<float>(sum) - 131070.0F);
  }

 private:
  float mean_;
  float step_;  // of the sum, whose deviation is 65536 / sqrt(3)
};

// Large tensors repeat their first elements. The number of these is prime, so no two rows of a tensor are equal.
inline std::vector<std::byte> random_elements(std::int64_t count, Dtype dtype, std::mt19937_64& random,
                                              const Normal& normal = Normal()) {
  constexpr std::size_t kPeriod = 65521;
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  const std::size_t period = std::min(bytes.size(), kPeriod * size_of(dtype));
  for (std::size_t at = 0; at < period; at += size_of(dtype)) {
    store_element(bytes.data() + at, dtype, normal(random));
  }
  for (std::size_t at = period; at < bytes.size(); at += period) {
    std::memcpy(bytes.data() + at, bytes.data(), std::min(period, bytes.size() - at));
  }
  return bytes;
}

}  // namespace ringattn::testing
