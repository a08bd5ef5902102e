// SPDX-License-Identifier: Apache-2.0
// How many keys a decode step's block mask has its ranks attend to. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "attention/tokens/job.hpp"

namespace ringattn {

// Keys of each mask row, [sequences, mask rows of a sequence]: those of the blocks that it names, and of the rows' own.
// Empty where the job has no block mask, or the mask of other sequences (as the last rows of another job have), or
// where its rows can't be decoded with it (why_not_decodable()).
std::vector<std::int64_t> keys_per_mask_row(const Job& job);

// The keys of all K/V heads that rank `rank` attends to. `listed`: result of keys_per_mask_row().
std::int64_t attended_keys(const std::vector<std::int64_t>& listed, const Job& job, const DecodeDeal& deal, int rank);

}  // namespace ringattn
