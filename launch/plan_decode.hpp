// SPDX-License-Identifier: Apache-2.0
// `ringattn plan` of a decode step: memory of the cache, scratch and partial results, and the bytes sent.
#pragma once

#include <vector>

#include "attention/files/job_input.hpp"
#include "launch/commands.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// One row for each input and each of --world. Throws what a run of the same flags would refuse; in a list, a world that
// is too small is an answer.
int plan_decode(const Invocation& invocation, const std::vector<JobInput>& inputs, const Screen& screen);

}  // namespace ringattn
