// SPDX-License-Identifier: Apache-2.0
// Positions of keys in a cache from which random tokens were evicted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/key_positions.hpp"

namespace ringattn::testing {

// That many keys of each sequence, out of about twice as many tokens, different ones in each of `heads` heads.
inline std::shared_ptr<const KeyPositions> random_positions(std::span<const std::int64_t> keys, int heads,
                                                            std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<KeptSequence> sequences;
  std::vector<std::int32_t> rows;
  for (const std::int64_t count : keys) {
    const std::int64_t whole = 2 * count + 3;
    const std::size_t first = rows.size();
    rows.resize(first + static_cast<std::size_t>(count * heads));
    for (int head = 0; head < heads; ++head) {
      std::int64_t left = count;
      for (std::int64_t position = 0; position < whole && left > 0; ++position) {
        if (static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(whole - position)) >= left) continue;
        rows[first + static_cast<std::size_t>((count - left) * heads + head)] = static_cast<std::int32_t>(position);
        --left;
      }
    }
    sequences.push_back({count, whole});
  }
  return std::make_shared<const KeyPositions>("positions", heads, std::move(sequences), rows);
}

}  // namespace ringattn::testing
