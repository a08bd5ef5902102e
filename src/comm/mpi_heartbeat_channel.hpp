// SPDX-License-Identifier: Apache-2.0
// Signs of life as messages of MPI.
#pragma once

#include <memory>

#include "comm/heartbeat_monitor.hpp"
#include "comm/mpi_transport_context.hpp"

namespace ringattn {

// Over MPI_COMM_WORLD: MPI is initialised, and nobody else uses its tag there. `context` is told of silence.
std::unique_ptr<HeartbeatChannel> make_mpi_heartbeat_channel(std::shared_ptr<MpiTransportContext> context);

}  // namespace ringattn
