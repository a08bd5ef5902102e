// SPDX-License-Identifier: Apache-2.0
// FLOPs and bytes of an input's job, by the formulas of tokens/cost.hpp.
#pragma once

#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// FLOPs of the attention; for MLA, in the form that computes it.
double job_flops(const JobInput& input);

}  // namespace ringattn
