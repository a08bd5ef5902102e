// SPDX-License-Identifier: Apache-2.0
// Where arrays begin that share one stretch of memory: at multiples of what a device's allocator and a caller's
// workspace are aligned to, which is more than any kernel asks for.
#pragma once

#include <cstddef>

namespace ringattn {

inline constexpr std::size_t kAlignment = 256;

// The bytes up to where the next array may begin.
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace ringattn
