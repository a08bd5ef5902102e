// SPDX-License-Identifier: Apache-2.0
// Division by a launch-time constant in three instructions, instead of about 25.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ringattn::cuda {

class Divider {
 public:
  Divider() = default;  // divides by 1
  // d from 1 to 2^31. With 2^l the least power of two that is not less than d, ⌊n / d⌋ = ⌊(⌊n · m / 2^32⌋ + n) / 2^l⌋
  // with m = ⌊2^32 · (2^l − d) / d⌋ + 1.
  explicit Divider(std::int64_t d) {
    while (std::int64_t{1} << shift_ < d) ++shift_;
    multiplier_ = static_cast<std::uint32_t>((((std::int64_t{1} << shift_) - d) << 32) / d + 1);
  }

  // n / d for n ≥ 0.
  RINGATTN_HOST_DEVICE std::int32_t quotient(std::int32_t n) const {
    const auto number = static_cast<std::uint32_t>(n);
    const auto high = static_cast<std::uint32_t>(std::uint64_t{number} * multiplier_ >> 32);
    return static_cast<std::int32_t>((high + number) >> shift_);
  }

 private:
  std::uint32_t multiplier_ = 1;
  std::uint32_t shift_ = 0;
};

}  // namespace ringattn::cuda
