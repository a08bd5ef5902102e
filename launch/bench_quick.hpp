// SPDX-License-Identifier: Apache-2.0
// `bench --quick`: within a minute, the README's table for this machine.
#pragma once

#include "launch/commands.hpp"

namespace ringattn {

inline constexpr double kQuickSeconds = 45.0;  // planned; estimates may be off by a third

// Measures each job by ringattn, then by PyTorch where python3 can import it. A short run of each series' smallest size
// says how large its jobs may be, so that all end within a minute. Returns the exit code. Throws kUsage for flags that
// choose a job, and for several ranks. `seconds`: planned for all jobs; the first one is measured in any case.
int bench_quick(const Invocation& invocation, Transport& world, double seconds = kQuickSeconds);

}  // namespace ringattn
