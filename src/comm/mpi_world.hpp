// SPDX-License-Identifier: Apache-2.0
// MPI's part of comm/world.cpp, which doesn't include mpi.h itself.
#pragma once

#include <functional>

#include "comm/world.hpp"

namespace ringattn {

// Initializes MPI, lets the ranks agree that they can start (not if this one has a `refusal`), runs rank_main, ends the
// world as run_world() promises, finalizes MPI and returns the exit code. Does not return if a rank failed outside a
// collective phase.
int run_mpi_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                  const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
