// SPDX-License-Identifier: Apache-2.0
// A rank's rows as runs of the packed token axis. Files, digests and synthetic inputs use packed tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "kernels/common/synthetic.hpp"

namespace ringattn {

// The runs of a rank on the packed axis. Adjacent runs are merged, also across sequences. `packed_begin`: packed token
// at which each sequence begins (Batch::cu_q() or cu_k()).
inline std::vector<PackedRun> packed_runs(std::span<const TokenRun> runs, std::span<const std::int64_t> packed_begin) {
  std::vector<PackedRun> packed;
  for (const TokenRun& run : runs) {
    if (run.tokens() == 0) continue;
    const std::int64_t origin = packed_begin[static_cast<std::size_t>(run.sequence)];
    if (!packed.empty() && packed.back().end == origin + run.begin) {
      packed.back().end = origin + run.end;
    } else {
      packed.push_back({origin + run.begin, origin + run.end});
    }
  }
  return packed;
}

}  // namespace ringattn
