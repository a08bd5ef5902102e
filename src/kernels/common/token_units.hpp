// SPDX-License-Identifier: Apache-2.0
// Units of tokens, in which gradients of parameters are summed: kTokenUnit consecutive tokens of a sequence, counted
// from its first. A gradient of a parameter is a function of the batch:
//
//   the sum over a unit's tokens, from zero, in an order that the kernel fixes; the sums of units added in fp32, units
//   ascending, sequences in the order of the batch; the first one is stored, not added to zeros
//
// So it depends neither on the ranks nor on how tokens are dealt to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace ringattn {

inline constexpr std::int64_t kTokenUnit = 2048;

// Packed tokens [first, first + tokens), at most kTokenUnit.
struct TokenUnit {
  std::int64_t first = 0;
  std::int64_t tokens = 0;

  bool operator==(const TokenUnit&) const = default;
};

// The units of packed sequences of these lengths, in the order of the sum. Empty sequences have none.
inline std::vector<TokenUnit> token_units(std::span<const std::int64_t> lengths) {
  std::vector<TokenUnit> units;
  std::int64_t sequence = 0;
  for (const std::int64_t length : lengths) {
    for (std::int64_t begin = 0; begin < length; begin += kTokenUnit) {
      units.push_back({sequence + begin, std::min(kTokenUnit, length - begin)});
    }
    sequence += length;
  }
  return units;
}

}  // namespace ringattn
