// SPDX-License-Identifier: Apache-2.0
// Transport `mpi`: non-blocking sends and receives of host memory. Also the bootstrap and control channel of device
// transports. Present only where the build found MPI.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>

#include "comm/transport.hpp"

namespace ringattn {
struct MpiCalls;
}

// Of libringattn_mpi, the library that is linked to MPI, and all that it has: who includes this header links it.
extern "C" const ringattn::MpiCalls* ringattn_mpi_calls();

namespace ringattn {

struct MpiOptions {
  Route route = Route::kChain;
  // Spans beyond this travel as several requests: counts are int. The same on all ranks.
  std::size_t request_bytes = std::size_t{1} << 30;
  // Exchanges that a rank may have in flight; each of them needs a tag. The same on all ranks.
  int max_exchanges = 1 << 14;
  double setup_seconds = 60.0;  // for the ranks to come
};

// Duplicates `communicator` (collective), so the caller's own messages are never matched. MPI must be initialised with
// at least MPI_THREAD_FUNNELED, and all calls come from the thread that made the transport. Destroy it before
// MPI_Finalize. abort() tells the other ranks but ends no process: a program calls MPI_Abort after it (comm/world.hpp).
std::unique_ptr<Transport> make_mpi_transport(const MpiCalls& calls, MPI_Comm communicator, const MpiOptions& options);
inline std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, const MpiOptions& options = {}) {
  return make_mpi_transport(*ringattn_mpi_calls(), communicator, options);
}

}  // namespace ringattn
