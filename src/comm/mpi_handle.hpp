// SPDX-License-Identifier: Apache-2.0
// An MPI transport for callers that don't see mpi.h.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

// make_mpi_transport() of the MPI_Comm that `communicator` points to. Throws kUnsupported in a build without MPI.
std::unique_ptr<Transport> make_mpi_transport_of(const void* communicator);

}  // namespace ringattn
