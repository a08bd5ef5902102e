// SPDX-License-Identifier: Apache-2.0
// `ringattn run` for an SSM op.
#pragma once

#include "comm/transport.hpp"
#include "launch/report.hpp"

namespace ringattn {

// Returns the exit code.
int run_ssm(const Invocation& invocation, Transport& world, Report& report);

}  // namespace ringattn
