// SPDX-License-Identifier: Apache-2.0
// Alignment of arrays that share one allocation. 256 bytes is what device allocators and callers' workspaces guarantee,
// and more than any kernel requires.
#pragma once

#include <cstddef>

namespace ringattn {

inline constexpr std::size_t kAlignment = 256;

// Rounds `bytes` up to the offset at which the next array may begin.
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace ringattn
