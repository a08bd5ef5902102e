// SPDX-License-Identifier: Apache-2.0
// The number of keys to which a decode step with a block mask attends. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "attention/tokens/job.hpp"

namespace ringattn {

// The number of keys of each mask row, [sequences, mask rows of a sequence]: those of its blocks, and of the rows' own
// tokens. Empty if the job has no block mask, if the mask is that of other sequences (as in last_rows()), or if the
// rows can't be decoded with it (why_not_decodable()).
std::vector<std::int64_t> keys_per_mask_row(const Job& job);

// The keys of all K/V heads that rank `rank` attends to. `listed`: result of keys_per_mask_row().
std::int64_t attended_keys(const std::vector<std::int64_t>& listed, const Job& job, const DecodeDeal& deal, int rank);

}  // namespace ringattn
