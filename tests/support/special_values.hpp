// SPDX-License-Identifier: Apache-2.0
// Values that are not finite, which many tests use.
#pragma once

#include <limits>

namespace ringattn::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace ringattn::testing
