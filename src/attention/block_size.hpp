// SPDX-License-Identifier: Apache-2.0
// How large a block may be whose rows are made anew where they are folded, decompressed or expanded: as large as the
// memory budget leaves candidate for beside what a rank needs anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "attention/options.hpp"
#include "attention/plan_summary.hpp"

namespace ringattn {

// At so many keys a block, reading and writing the state is about one percent of its fold.
inline constexpr std::int64_t kBlockTokens = std::int64_t{1} << 15;

// PlanOptions::max_block_tokens from `most` on, halved down to a tile; 0 instead of as many as the job's `keys`, and
// where the caller states the blocks. Each once.
std::vector<std::int64_t> block_sizes(const Options& options, std::int64_t keys, std::int64_t most, int key_tile);

// Of `candidates` ways to make a job's rows, from the one that is wanted to the smallest one, the first with which a
// world of `world` ranks keeps to Options::memory_budget: shards, state, scratch, and two buffers of its blocks. Where
// none does, the one that needs the least, so that a plan either has candidate for it or names what is enough. 0
// without a budget. ring(i): the job in candidate i, which differs from the others in what it needs beside its blocks;
// what it returns is used until the next call. Throws what check_size() and MinBudget throw.
std::size_t choose_block_size(std::size_t candidates, const Options& options, int world,
                              const std::function<RingJob(std::size_t candidate)>& ring);

}  // namespace ringattn
