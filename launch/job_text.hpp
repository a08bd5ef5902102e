// SPDX-License-Identifier: Apache-2.0
// Context lines about a job, shared by the subcommands.
#pragma once

#include <string>

#include "attention/attention.hpp"
#include "attention/files/job_input.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// "striped, stripe 128 tokens"
std::string layout_text(const LayoutRequest& request);

// World, input, job, kernel, layout and plan of a job that is about to run.
void print_job(const Screen& screen, const JobInput& input, const Attention& attention, const Report& report);

}  // namespace ringattn
