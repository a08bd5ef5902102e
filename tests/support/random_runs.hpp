// SPDX-License-Identifier: Apache-2.0
// Random ways to share tokens between ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "attention/tokens/packed_run.hpp"

namespace ringattn::testing {

// Distributes [0, tokens) over `world` ranks in runs of 1 to `longest` tokens. Adjacent runs of a rank are joined.
inline std::vector<std::vector<PackedRun>> deal_randomly(std::int64_t tokens, int world, std::int64_t longest,
                                                         std::mt19937_64& random) {
  std::vector<std::vector<PackedRun>> ranks(static_cast<std::size_t>(world));
  for (std::int64_t begin = 0; begin < tokens;) {
    const std::int64_t end =
        std::min(tokens, begin + 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(longest)));
    auto& runs = ranks[random() % ranks.size()];
    if (!runs.empty() && runs.back().end == begin) {
      runs.back().end = end;
    } else {
      runs.push_back({begin, end});
    }
    begin = end;
  }
  return ranks;
}

}  // namespace ringattn::testing
