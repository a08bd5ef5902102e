// SPDX-License-Identifier: Apache-2.0
// Jobs of other lengths in the room of a prepared one. Pure: every rank finds the same answer for itself.
#pragma once

#include "attention/options.hpp"
#include "attention/plan_summary.hpp"
#include "attention/tokens/batch.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// The options with which a job of `batch` runs in what was allocated for `prepared`: with blocks as large as its, or
// smaller ones where shorter sequences, of which more lie in a block, would need more room on any rank. Throws kUsage
// when there are more sequences, a longer one, or no such blocks.
Options options_within(const RingJob& prepared, const Options& options, const Batch& batch, Route route, int world);

}  // namespace ringattn
