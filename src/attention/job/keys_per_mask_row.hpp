// SPDX-License-Identifier: Apache-2.0
// How many keys the lists of a decoding step have its ranks fold. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "attention/tokens/job.hpp"

namespace ringattn {

// Keys of each list, [sequences, lists of a sequence]: those of the blocks that it names, and of the rows' own. Empty
// where the job has no block_mask, or has those of other sequences, as one of the last rows of another job, or where
// its rows are no step by them (why_not_decodable()).
std::vector<std::int64_t> keys_per_mask_row(const Job& job);

// Of what keys_per_mask_row() has said, the keys that rank `rank` folds, those of each of its K/V heads.
std::int64_t attended_keys(const std::vector<std::int64_t>& listed, const Job& job, const DecodeDeal& deal, int rank);

}  // namespace ringattn
