// SPDX-License-Identifier: Apache-2.0
// A layout of the caller's own: segments dealt to the ranks in turn.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::testing {

inline std::vector<std::vector<TokenRun>> deal_segments(std::span<const std::int64_t> lengths, int ranks) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(ranks));
  int next = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s]; begin += kSegmentTokens) {
      runs[static_cast<std::size_t>(next++ % ranks)].push_back(
          {static_cast<std::int32_t>(s), begin, std::min(lengths[s], begin + kSegmentTokens)});
    }
  }
  return runs;
}

}  // namespace ringattn::testing
