// SPDX-License-Identifier: Apache-2.0
// Constants of the contract in linear.hpp that device code also uses.
#pragma once

#include <cstdint>

namespace ringattn {

enum class LinearActivation : std::uint8_t { kNone, kGelu, kGeluTanh, kSilu };

inline constexpr std::int64_t kLinearSplit = 2048;
inline constexpr int kLinearLeaves = 8;
inline constexpr std::int64_t kInt4Group = 128;

// Nodes of the tree of leaves are numbered as in a heap: 1 is the root, 2n and 2n + 1 are the children of n, and
// kLinearLeaves + i is leaf i.
inline constexpr int kLinearNodes = 2 * kLinearLeaves;

}  // namespace ringattn
