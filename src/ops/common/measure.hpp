// SPDX-License-Identifier: Apache-2.0
// The machine model of a world, measured on its ranks at once.
#pragma once

#include "attention/ring/machine_model.hpp"
#include "comm/transport.hpp"
#include "ops/attention/attention.hpp"

namespace ringattn {

// Folds a short job for the compute rate, and passes messages around the ring for link rate and latency; the slowest
// rank counts. A world of one rank keeps the default link. The kernel is the one that `options` choose.
// Collective; takes about a second.
MachineModel measure_machine(const Options& options, Transport& world);

}  // namespace ringattn
