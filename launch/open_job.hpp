// SPDX-License-Identifier: Apache-2.0
// Opens the job that a configuration asks for.
#pragma once

#include <memory>
#include <vector>

#include "launch/config.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

// The job of this world. Collective. Rank 0 prints notes about the input for the user. Throws kFile and kUsage.
std::unique_ptr<OpJob> open_job(const Config& config, OpUse use, Transport& world, const Collective& collective);

// A job of each length, to be planned. Not collective.
std::vector<std::unique_ptr<OpJob>> open_planned_jobs(const Config& config);

// The shape of an input file's job. Not collective.
InputShape input_shape(const Config& config);

}  // namespace ringattn
