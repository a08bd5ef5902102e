// SPDX-License-Identifier: Apache-2.0
// Chooses the block size of jobs whose ring steps decompress or expand blocks into a workspace: as large as the memory
// budget permits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "attention/options.hpp"
#include "ops/attention/plan_summary.hpp"

namespace ringattn {

// With this many keys per block, reading and writing the attention state takes about one percent of the compute time.
inline constexpr std::int64_t kBlockTokens = std::int64_t{1} << 15;

// Candidates of PlanOptions::max_block_tokens: `max_tokens`, halved repeatedly down to a tile; 0 (no limit) in place of
// a size that covers all of the job's `keys`, and if the caller states the block size. Each value once.
std::vector<std::int64_t> block_sizes(const Options& options, std::int64_t keys, std::int64_t max_tokens, int key_tile);

// Index of the first of `candidates` candidates, from the preferred to the smallest one, with which a world of `world`
// ranks fits into Options::memory_budget: shards, state, scratch and two block buffers. If none fits, the candidate
// that needs least, so that the plan can report a sufficient budget. 0 without a budget. ring(i) is the job with
// candidate i; the candidates may differ only in what they need besides blocks. Its result is used until the next call.
// Throws what check_size() and MinBudget throw.
std::size_t choose_block_size(std::size_t candidates, const Options& options, int world,
                              const std::function<RingJob(std::size_t candidate)>& ring);

}  // namespace ringattn
