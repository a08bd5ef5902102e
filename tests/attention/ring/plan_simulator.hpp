// SPDX-License-Identifier: Apache-2.0
// Runs the plans of all ranks together, with token numbers for keys and queries: messages, copies and tile addresses as
// the engine would use them. Derives what a plan must do only from the job, in each of its directions.
#pragma once

#include <string>

#include "tests/attention/ring/random_job.hpp"

namespace ringattn::testing {

// The first broken promise, or nothing: every (row, tile) pair is computed exactly once and in ascending order,
// and no others; every tile's address leads to its tokens; sends match receives and send only what is there; nothing
// arrives that isn't needed, or twice; no buffer is overrun; the sums of flops and bytes are right. If queries travel,
// too: blocks cut keys and queries at the same positions, and one message has the rows of both.
std::string broken_promise(const RandomJob& random, const JobLayout& layout);

}  // namespace ringattn::testing
