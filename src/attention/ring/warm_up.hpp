// SPDX-License-Identifier: Apache-2.0
// What ranks do with each other once, before the first run.
#pragma once

#include <cstddef>

#include "attention/ring/machine_model.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// Threads for a host kernel where the caller names none: this process's processors, shared with the ranks that have the
// same ones. Collective.
int default_host_threads(const Collective& collective);

// The machine model that all ranks plan with: the one that is given, or, where it says nothing, the default of the
// kernel at the slowest rank's rate, for ranks with unequal shares of their hosts make one plan. Collective.
MachineModel common_machine(const Collective& collective, const MachineModel& given, const KernelEntry& kernel,
                            const Backend& backend);

// A byte from everyone to everyone: transports map memory and build their channels when they first use them, which
// takes far longer than a run should. `bytes` of the backend's memory are overwritten, one for each rank. Collective.
void warm_up_transport(const Collective& collective, Transport& transport, Backend& backend, std::byte* bytes);

}  // namespace ringattn
