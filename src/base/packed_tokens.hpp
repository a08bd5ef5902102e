// SPDX-License-Identifier: Apache-2.0
// The packed token axis, on which the tokens of all sequences are concatenated.
#pragma once

#include <cstdint>
#include <span>

namespace ringattn {

// Maximum number of sequences of a batch: tables of a plan have an entry for each.
inline constexpr std::int64_t kMaxSequences = std::int64_t{1} << 20;

// Tokens [begin, end) of the packed axis.
struct PackedRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t tokens() const { return end - begin; }
  bool operator==(const PackedRun&) const = default;
};

inline std::int64_t total_tokens(std::span<const PackedRun> runs) {
  std::int64_t tokens = 0;
  for (const PackedRun& run : runs) tokens += run.tokens();
  return tokens;
}

}  // namespace ringattn
