// SPDX-License-Identifier: Apache-2.0
// Compares the tensors of an input with the layer of --model-config.
#pragma once

#include "launch/config.hpp"
#include "ops/common/job_input.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// Throws kUsage where the config.json of --model-config has other dims than the tensors of the input: both are named.
// Heads may be some of the model's, a share that divides them. Nothing where there is no such file, or the input is
// none.
void check_model(const Config& config, const JobInput& input);
void check_model(const Config& config, const SsmJob& job);

}  // namespace ringattn
