// SPDX-License-Identifier: Apache-2.0
// Measures the machine model of a world on all of its ranks at once.
#pragma once

#include "attention/ring/machine_model.hpp"
#include "comm/transport.hpp"
#include "ops/attention/attention.hpp"

namespace ringattn {

// Computes attention for a quarter of a second in bf16 and in fp32, has the threads of host ranks read memory, does the
// same with one thread of each host rank, and passes messages around the ring for link rate and latency. The slowest
// rank counts. A world of one rank keeps the default link. `options` choose the kernel and the number of threads of a
// rank. Collective; takes two to four seconds.
MachineModel measure_machine(const Options& options, Transport& world);

}  // namespace ringattn
