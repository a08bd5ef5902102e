// SPDX-License-Identifier: Apache-2.0
// A job over a cache from which random tokens were evicted.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention/tokens/job.hpp"
#include "tests/support/random_key_positions.hpp"

namespace ringattn::testing {

// The job's keys are left over from sequences of about twice as many tokens, different ones in each of `heads` heads.
// Some queries must be between evicted tokens; otherwise the job gets no positions.
inline Job with_random_positions(Job job, int heads, std::uint64_t seed) {
  std::vector<std::int64_t> keys;
  for (const Sequence& s : job.batch.sequences) keys.push_back(s.k_len);
  set_positions(job, random_positions(keys, heads, seed));
  return job;
}

}  // namespace ringattn::testing
