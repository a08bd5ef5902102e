// SPDX-License-Identifier: Apache-2.0
// What an input file says in place of the flags of a shape: for reports and --print-config, which would show defaults.
#pragma once

#include "attention/tokens/ssm_job.hpp"
#include "launch/config.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// `latents`: the MLA spec, whose `job` is that of the expanded keys and values; null for other ops.
FileShape file_shape(Op op, const Job& job, const MlaSpec* latents);
FileShape file_shape(const SsmJob& job);
FileShape shape_of(const JobInput& input);

// Opens the input that the configuration names. Throws what opening it throws.
FileShape shape_of_input(const Config& config);

// Throws kUsage where the config.json of --model-config has other dims than the tensors of the input: both are named.
// Heads may be some of the model's, a share that divides them. Nothing where there is no such file, or the input is
// none.
void check_model(const Config& config, const JobInput& input);
void check_model(const Config& config, const SsmJob& job);

}  // namespace ringattn
