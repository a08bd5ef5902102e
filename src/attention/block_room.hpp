// SPDX-License-Identifier: Apache-2.0
// How large a block may be whose rows are made anew where they are folded, decompressed or expanded: as large as the
// memory budget leaves room for beside what a rank needs anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "attention/forecast.hpp"
#include "attention/options.hpp"

namespace ringattn {

// At so many keys a block, reading and writing the state is about one percent of its fold.
inline constexpr std::int64_t kBlockTokens = std::int64_t{1} << 15;

// PlanOptions::most_block_tokens from `most` on, halved down to a tile; 0 instead of as many as the job's `keys`, and
// where the caller states the blocks. Each once.
std::vector<std::int64_t> block_sizes(const Options& options, std::int64_t keys, std::int64_t most, int key_tile);

// Of `rooms` ways to make a job's rows, from the one that is wanted to the smallest one, the first with which a world
// of `world` ranks keeps to Options::memory_budget: shards, state, scratch, and two buffers of its blocks. Where none
// does, the one that needs the least, so that a plan either has room for it or names what is enough. 0 without a
// budget. ring(i): the job in room i, which differs from the others in what it needs beside its blocks; what it returns
// is used until the next call. Throws what check_size() and LeastBudget throw.
std::size_t choose_room(std::size_t rooms, const Options& options, int world,
                        const std::function<RingJob(std::size_t room)>& ring);

}  // namespace ringattn
