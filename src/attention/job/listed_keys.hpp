// SPDX-License-Identifier: Apache-2.0
// How many keys the lists of a decoding step have its ranks fold. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/job.hpp"
#include "attention/tokens/step_deal.hpp"

namespace ringattn {

// Keys of each list, [sequences, lists of a sequence]: those of the blocks that it names, and of the rows' own. Empty
// where the job has no lists, or has those of other sequences, as one of the last rows of another job, or where its
// rows are no step by them (why_no_step()).
std::vector<std::int64_t> listed_keys(const Job& job);

// Of what listed_keys() has said, the keys that rank `rank` folds, those of each of its K/V heads.
std::int64_t folded_keys(const std::vector<std::int64_t>& listed, const Job& job, const StepDeal& deal, int rank);

}  // namespace ringattn
