// SPDX-License-Identifier: Apache-2.0
// `ringattn plan` for a decode step: the memory of the cache, of scratch and of partials, and the bytes sent.
#pragma once

#include <vector>

#include "launch/commands.hpp"
#include "launch/screen.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// Prints a row for each input and each number of ranks in --world, and writes the report. Returns the exit code. Throws
// the errors that `run` would throw with these flags, except that with several rows, too small a memory budget is
// reported for its row (PlanTable::add()).
int plan_decode(const Invocation& invocation, const std::vector<JobInput>& inputs, const Screen& screen);

}  // namespace ringattn
