// SPDX-License-Identifier: Apache-2.0
// Heartbeats as MPI messages.
#pragma once

#include <memory>

#include "comm/heartbeat_monitor.hpp"
#include "comm/mpi_transport_context.hpp"

namespace ringattn {

// Uses MPI_COMM_WORLD and a tag there that nothing else uses. MPI must be initialized. `context` is told when ranks
// fall silent.
std::unique_ptr<HeartbeatChannel> make_mpi_heartbeat_channel(std::shared_ptr<MpiTransportContext> context);

}  // namespace ringattn
