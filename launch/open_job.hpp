// SPDX-License-Identifier: Apache-2.0
// Opens the input that a configuration names, as a job of the op that computes it.
#pragma once

#include <memory>
#include <vector>

#include "comm/collective.hpp"
#include "launch/config.hpp"
#include "ops/common/op_job.hpp"

namespace ringattn {

// Checks the flags of the input, opens it and has the ranks agree on it. Warns of queries that see no key.
// `whole_result`: the job also computes final states. Collective. Throws kUsage, kFile.
std::unique_ptr<OpJob> open_job(const Config& config, Transport& world, const Collective& collective,
                                bool whole_result = false);

// The job of a point of a benchmark. Without --op, an input that no kernel decodes becomes attention. Collective.
std::unique_ptr<OpJob> open_measured_job(const Config& config, Transport& world, const Collective& collective);

// The jobs of `plan`: one for each length, or that of the file. Not collective.
std::vector<std::unique_ptr<OpJob>> open_planned_jobs(const Config& config);

// The shape of the input, which is opened for it. Not collective. Throws what opening it throws.
InputShape input_shape(const Config& config);

}  // namespace ringattn
