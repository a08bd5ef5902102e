// SPDX-License-Identifier: Apache-2.0
// The first collective of the ranks that MPI has started. It reports which ranks have not come. The calls that make
// communicators would wait for them for ever.
#pragma once

#include <mpi.h>

#include "base/deadline.hpp"

namespace ringattn {

// Returns once all ranks of `communicator` have called it. Throws kPeer, naming the ranks that have not, when the
// deadline passes.
void await_ranks(MPI_Comm communicator, const Deadline& deadline);

}  // namespace ringattn
