// SPDX-License-Identifier: Apache-2.0
// Options for shorter batches in the memory that was allocated for a job. Pure: every rank computes the same result.
#pragma once

#include "attention/options.hpp"
#include "attention/tokens/batch.hpp"
#include "comm/transport.hpp"
#include "ops/attention/plan_summary.hpp"

namespace ringattn {

// The options with which a job of `batch` runs in the memory of `prepared`. Blocks are as large, or smaller if shorter
// sequences, more of which fit into a block, would need more memory on any rank. Throws kUsage if there are more
// sequences, if a sequence is longer, or if no block size fits.
Options options_within(const RingJob& prepared, const Options& options, const Batch& batch, Route route, int world);

}  // namespace ringattn
