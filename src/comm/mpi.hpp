// SPDX-License-Identifier: Apache-2.0
// Transport `mpi`: non-blocking sends and receives of host memory. It also serves as the bootstrap and control channel
// of device transports. Present only if the build found MPI.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>

#include "comm/transport.hpp"

namespace ringattn {
struct MpiCalls;
}

// The only function of libringattn_mpi, the library that is linked to MPI. Targets that include this header link it.
extern "C" const ringattn::MpiCalls* ringattn_mpi_calls();

namespace ringattn {

struct MpiOptions {
  Route route = Route::kChain;
  // Larger spans are split into several requests, because MPI counts are int. Equal on all ranks.
  std::size_t request_bytes = std::size_t{1} << 30;
  // Exchanges that a rank may have in flight. Each needs its own tag. Equal on all ranks.
  int max_exchanges = 1 << 14;
  double setup_seconds = 60.0;  // time limit for all ranks to join
};

// Duplicates `communicator` (collective), so the caller's own messages are never matched. MPI must be initialized with
// at least MPI_THREAD_FUNNELED, and all calls must come from the thread that made the transport. Destroy it before
// MPI_Finalize. abort() tells the other ranks but ends no process: a program calls MPI_Abort after it (comm/world.hpp).
std::unique_ptr<Transport> make_mpi_transport(const MpiCalls& calls, MPI_Comm communicator, const MpiOptions& options);
inline std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, const MpiOptions& options = {}) {
  return make_mpi_transport(*ringattn_mpi_calls(), communicator, options);
}

}  // namespace ringattn
