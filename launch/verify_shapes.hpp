// SPDX-License-Identifier: Apache-2.0
// `ringattn verify` without a reference: the job in other shapes, compared bit for bit.
#pragma once

#include <vector>

#include "launch/commands.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// World sizes in which a job is verified: 1 to the world's size, or {1, 2, 3, 4, 7} where neither --ranks nor a
// launcher sets the number of ranks.
std::vector<int> world_sizes(const Config& config, const Transport& world);

// Runs the job in worlds of several sizes, split from `world`, with every layout and two block sizes or, of a decode
// step, with pages of several sizes, without pages and by Attention, and compares out and lse with those of the first
// shape. Prints a table of shapes and the first difference; true if there is none.
// Collective.
bool verify_shapes(const Invocation& invocation, const JobInput& input, Options library, const Screen& screen,
                   Transport& world, Report& report);

// Ranks that verify makes in this process where neither --ranks nor mpirun says how many.
inline constexpr int kLargestLocalWorld = 7;

}  // namespace ringattn
