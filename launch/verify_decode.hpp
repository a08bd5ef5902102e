// SPDX-License-Identifier: Apache-2.0
// `ringattn verify --decode`: the last rows of a prefill, decoded step by step.
#pragma once

#include "launch/commands.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// Computes the job, decodes the last --rows rows of each sequence from caches that grow, and compares bits. Prints a
// table of caches and the first difference; true if there is none. Collective.
bool verify_decode(const Invocation& invocation, const JobInput& input, const Options& library, const Screen& screen,
                   Transport& world, Report& report);

}  // namespace ringattn
