// SPDX-License-Identifier: Apache-2.0
// What `bench` measures where nobody names an op: a few rows at the end of their keys are decode steps.
#pragma once

#include "attention/files/job_input.hpp"
#include "launch/config.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// Makes decode the default of --op where --q-len gives no more rows than a step has, and no other flag asks for what
// rows around the ring alone have.
void fill_bench_op(Config& config);

// Of few rows: what is measured, and how to measure the other thing.
void print_bench_op(const Screen& screen, const Config& config, const JobInput& input);

}  // namespace ringattn
