// SPDX-License-Identifier: Apache-2.0
// Context lines about a job, shared by the subcommands.
#pragma once

#include <string>

#include "attention/attention.hpp"
#include "launch/job_input.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// "bf16, heads 8/2 (GQA 4:1), head_dim 128, causal; 3 sequences, 1000 queries, 4096 keys"
std::string job_text(const Job& job);

// "striped, stripe 128 tokens"
std::string layout_text(const LayoutRequest& request);

// World, input, job, kernel, layout and plan of a job that is about to run.
void print_job(const Screen& screen, const JobInput& input, const Attention& attention, const Report& report);

}  // namespace ringattn
