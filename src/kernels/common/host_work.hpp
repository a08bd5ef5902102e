// SPDX-License-Identifier: Apache-2.0
// The time that host threads take for a kernel's call, from the work that the kernel's table row declares and from the
// rates of the processors: the one model of all time estimates of CPU kernels.
#pragma once

#include <algorithm>
#include <vector>

namespace ringattn {

// A rate that threads share: of one thread while the others are idle, and of all of them at once. In between it is
// linear.
struct HostRate {
  double one = 0.0;
  double all = 0.0;

  double of(double busy, int threads) const {
    const double together = std::max(one, all);  // more threads never count for less
    return threads <= 1 ? together : one + (together - one) * (busy - 1.0) / (threads - 1.0);
  }
};

// Rates of a rank's processors. Arithmetic is in cores: work is declared in seconds of one core of a Sapphire Rapids
// whose other hyperthread is idle.
struct HostRates {
  HostRate vector;              // cores that the threads are worth for SIMD instructions
  HostRate amx;                 // the same for AMX tiles
  HostRate memory;              // bytes a second
  double region_seconds = 0.0;  // start and end of a parallel region
};

// The rates that are assumed where none were measured. Constant, so that plans are reproducible.
HostRates default_host_rates(int threads);

// Equal work tiles that threads take one at a time in one parallel region, or in several.
struct WorkPhase {
  double tiles = 1.0;
  double vector_seconds = 0.0;  // all tiles together, on one core
  double amx_seconds = 0.0;
  double bytes = 0.0;  // read from memory and written to it; a written line is read first, so it counts twice
  double regions = 1.0;
};

// A call, or as much of a call as an estimate needs.
struct HostWork {
  int threads = 1;
  double flops = 0.0;  // as the op counts them
  std::vector<WorkPhase> phases;
};

double host_seconds(const HostWork& work, const HostRates& rates);

// FLOPs a second. `rates`: null for default_host_rates().
double host_speed(const HostWork& work, const HostRates* rates);

}  // namespace ringattn
