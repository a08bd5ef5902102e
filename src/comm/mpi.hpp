// SPDX-License-Identifier: Apache-2.0
// Transport `mpi`: non-blocking sends and receives of host memory. Also the bootstrap and control channel of device
// transports. Present only where the build found MPI.
#pragma once

#include <mpi.h>

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

// Duplicates `communicator` (collective), so the caller's own messages are never matched. MPI must be initialised with
// at least MPI_THREAD_FUNNELED, and all calls come from the thread that made the transport.
std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator);

}  // namespace ringattn
