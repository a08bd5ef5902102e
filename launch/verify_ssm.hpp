// SPDX-License-Identifier: Apache-2.0
// `ringattn verify` for an SSM op: in other worlds and cut in two, against fp64, an output file or a golden file.
#pragma once

#include "comm/transport.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// True if it passes. Collective.
bool verify_ssm(const Invocation& invocation, const Screen& screen, Transport& world, Report& report);

}  // namespace ringattn
