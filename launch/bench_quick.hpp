// SPDX-License-Identifier: Apache-2.0
// `bench --quick`: reproduces the README's table on this machine within a minute.
#pragma once

#include "launch/commands.hpp"

namespace ringattn {

inline constexpr double kQuickSeconds = 45.0;  // planned; estimates may be off by a third

// Measures each job by ringattn, then by PyTorch if python3 can import it. A short run of each series' smallest size
// determines how large its jobs may be, so that all end within a minute. Returns the exit code. Throws kUsage for flags
// that choose a job, and for several ranks. `seconds`: planned for all jobs; the first one is measured in any case.
int bench_quick(const Invocation& invocation, Transport& world, double seconds = kQuickSeconds);

}  // namespace ringattn
