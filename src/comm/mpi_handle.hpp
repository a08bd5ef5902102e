// SPDX-License-Identifier: Apache-2.0
// MPI for callers that don't see mpi.h.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.hpp"

namespace ringattn {

// Why this process can't have worlds of MPI: a build without it, or no MPI on this host. Empty: it can. Opens MPI's
// library, but doesn't start MPI.
std::string why_no_mpi();

// make_mpi_transport() of the MPI_Comm that `communicator` points to. Throws kUnsupported where there is no MPI.
std::unique_ptr<Transport> make_mpi_transport_of(const void* communicator);

}  // namespace ringattn
