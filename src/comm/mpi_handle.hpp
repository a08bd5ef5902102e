// SPDX-License-Identifier: Apache-2.0
// MPI for callers that don't include mpi.h.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.hpp"

namespace ringattn {

// Why this process can't use MPI: a build without it, or no MPI on this host. Empty if it can. Opens MPI's library, but
// doesn't initialize MPI.
std::string why_no_mpi();

// "Open MPI v4.1.4, package: …", or why there is none. Opens MPI's library, but doesn't initialize MPI.
std::string mpi_library_version();

// make_mpi_transport() for the MPI_Comm that `communicator` points to. Throws kUnsupported if there is no MPI.
std::unique_ptr<Transport> make_mpi_transport_of(const void* communicator);

}  // namespace ringattn
