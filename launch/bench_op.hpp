// SPDX-License-Identifier: Apache-2.0
// Which op `bench` measures without --op: a few rows at the end of their keys are decode steps.
#pragma once

#include "launch/config.hpp"
#include "launch/screen.hpp"
#include "ops/common/op_job.hpp"

namespace ringattn {

// Makes decode the default of --op where --q-len gives no more rows than a decode step has, and no other flag asks for
// an option that only ring attention has.
void fill_bench_op(Config& config);

// Where there are few rows: prints which op is measured, and how to measure the other one.
void print_bench_op(const Screen& screen, const Config& config, const OpJob& job);

}  // namespace ringattn
