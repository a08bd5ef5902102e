// SPDX-License-Identifier: Apache-2.0
// Inside transport `mpi`: a world together with its context, for programs that monitor their ranks.
#pragma once

#include <memory>

#include "comm/mpi.hpp"
#include "comm/mpi_transport_context.hpp"

namespace ringattn {

struct MpiWorld {
  std::unique_ptr<Transport> transport;
  std::shared_ptr<MpiTransportContext> context;
};

// As make_mpi_transport().
MpiWorld make_mpi_world(MPI_Comm communicator, const MpiOptions& options);

}  // namespace ringattn
