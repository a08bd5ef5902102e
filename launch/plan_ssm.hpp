// SPDX-License-Identifier: Apache-2.0
// `ringattn plan` for SSM ops.
#pragma once

#include "launch/commands.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// Plans each length of the configuration, or its file, for each world. Returns the exit code; throws Error.
int plan_ssm(const Invocation& invocation, const Screen& screen);

}  // namespace ringattn
