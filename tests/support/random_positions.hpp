// SPDX-License-Identifier: Apache-2.0
// Positions of keys as a cache has them that has lost tokens at random.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "attention/tokens/job.hpp"

namespace ringattn::testing {

// The job's keys are those that are left of sequences of about twice as many tokens, in each of `heads` heads others.
// Some queries must stand between tokens that were taken out, or the job is left without positions.
inline Job with_random_positions(Job job, int heads, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<KeptSequence> sequences;
  std::vector<std::int32_t> rows;
  for (const Sequence& s : job.batch.sequences) {
    const std::int64_t whole = 2 * s.k_len + 3;
    const std::size_t first = rows.size();
    rows.resize(first + static_cast<std::size_t>(s.k_len * heads));
    for (int head = 0; head < heads; ++head) {
      std::int64_t left = s.k_len;
      for (std::int64_t position = 0; position < whole && left > 0; ++position) {
        if (static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(whole - position)) >= left) continue;
        rows[first + static_cast<std::size_t>((s.k_len - left) * heads + head)] = static_cast<std::int32_t>(position);
        --left;
      }
    }
    sequences.push_back({s.k_len, whole});
  }
  set_positions(job, std::make_shared<const KeyPositions>("positions", heads, std::move(sequences), rows));
  return job;
}

}  // namespace ringattn::testing
