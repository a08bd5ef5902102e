// SPDX-License-Identifier: Apache-2.0
// The MPI half of comm/world.cpp, which doesn't see mpi.h itself.
#pragma once

#include <functional>

#include "comm/world.hpp"

namespace ringattn {

// Initialises MPI, lets the ranks agree that they can start (not if this one has a `refusal`), runs rank_main, ends the
// world as run_world() promises, finalises MPI and returns the code. Does not return where a rank failed alone.
int run_mpi_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                  const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
