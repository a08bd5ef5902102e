// SPDX-License-Identifier: Apache-2.0
// The first collective of the ranks that MPI has started, which tells who has not come: the calls that make
// communicators would wait for ever.
#pragma once

#include <mpi.h>

#include "base/deadline.hpp"

namespace ringattn {

// Returns once all ranks of `communicator` have called it. Throws kPeer, naming those that have not, when the deadline
// passes.
void await_ranks(MPI_Comm communicator, const Deadline& deadline);

}  // namespace ringattn
