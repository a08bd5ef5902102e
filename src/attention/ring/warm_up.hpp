// SPDX-License-Identifier: Apache-2.0
// Collective work of the ranks before their first run.
#pragma once

#include <cstddef>

#include "attention/ring/machine_model.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// Default number of threads of a host kernel: the processors of this process, divided by the number of ranks that share
// them. Collective.
int default_host_threads(const Collective& collective);

// The machine model with which all ranks plan: `own`, which job_machine() makes of `given`, but with the rate of the
// slowest rank. Ranks may have unequal shares of their hosts, but need one plan. Ranks that were given different rates
// keep their own, and the comparison of their configurations refuses them. Collective.
MachineModel common_machine(const Collective& collective, const MachineModel& given, MachineModel own);

// Sends one byte from every rank to every rank. Transports map memory and create their channels at first use, which
// takes far longer than a run. Overwrites `bytes`, one byte for each rank, in the backend's memory. Collective.
void warm_up_transport(const Collective& collective, Transport& transport, Backend& backend, std::byte* bytes);

}  // namespace ringattn
