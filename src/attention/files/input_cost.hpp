// SPDX-License-Identifier: Apache-2.0
// What an input's job costs, by the formulas of tokens/cost.hpp.
#pragma once

#include "attention/files/job_input.hpp"

namespace ringattn {

// Operations of its folds: of latents in the form that computes.
double job_flops(const JobInput& input);

}  // namespace ringattn
