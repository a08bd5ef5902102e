// SPDX-License-Identifier: Apache-2.0
// `info --measure`: the machine model of this world, measured on its ranks at once.
#pragma once

#include "attention/ring/machine_model.hpp"
#include "comm/transport.hpp"
#include "launch/config.hpp"

namespace ringattn {

// Folds a short job for the compute rate, and passes messages around the ring for link rate and latency; the slowest
// rank counts. A world of one rank keeps the default link. Collective; takes about a second.
MachineModel measure_machine(const Config& config, Transport& world);

}  // namespace ringattn
