// SPDX-License-Identifier: Apache-2.0
// `ringattn plan` for SSM ops.
#pragma once

#include "launch/commands.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// Prints a row for each length in --seq, or for the input file, and each number of ranks in --world, and writes the
// report. Returns the exit code. Throws Error.
int plan_ssm(const Invocation& invocation, const Screen& screen);

}  // namespace ringattn
