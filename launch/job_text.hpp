// SPDX-License-Identifier: Apache-2.0
// Context lines about a job, shared by the subcommands.
#pragma once

#include "launch/config.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// Says that synthetic input lacks the attention sinks that the layer of --model-config has.
void note_model_sinks(const Screen& screen, const Config& config);
void print_unread(const Screen& screen, const UnreadTensors& unread);
// Program, world, input, job, kernel and plan of a prepared job; with --verbose, devices and the plan's details.
void print_job(const Screen& screen, const Report& report);

}  // namespace ringattn
