// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/host_work.hpp"

#include <cmath>

namespace ringattn {

namespace {

// Rounds of work tiles until the last thread is done, in tiles of one thread. Threads of a host differ in speed, as
// hyperthreads share cores, so they end at times that are spread over the length of a tile: half of one is lost,
// however many there are (bench/notes/attention-portable.md#estimates).
double rounds_of(double tiles, int threads) {
  return tiles <= threads ? 1.0 : tiles / threads + 0.5 * (1.0 - 1.0 / threads);
}

double phase_seconds(const WorkPhase& phase, int threads, const HostRates& rates) {
  const double tiles = std::max(1.0, phase.tiles);
  const double busy = std::min<double>(threads, tiles);
  const double tile_seconds =
      phase.vector_seconds / rates.vector.of(busy, threads) + phase.amx_seconds / rates.amx.of(busy, threads);
  const double compute = rounds_of(tiles, threads) * tile_seconds * busy / tiles;
  const double memory = phase.bytes / rates.memory.of(busy, threads);
  // Threads wait for memory during a part of their work only, and compute during the rest.
  return phase.regions * rates.region_seconds + std::hypot(compute, memory);
}

}  // namespace

HostRates default_host_rates(int threads) {
  constexpr double kCoresOfThread = 0.55;   // hyperthreads share cores: 16 threads of a Xeon are worth 8.4 to 14 cores
  constexpr double kReadByThread = 1.5e10;  // bytes a second on a Xeon: 14.9e9 by one core,
  constexpr double kReadByHost = 1e11;      // 99e9 by 16 threads (bench/notes/decoding.md)
  constexpr double kRegionSeconds = 1e-5;
  const double cores = 1.0 + kCoresOfThread * (threads - 1);
  return {{1.0, cores},
          {1.0, cores},
          {kReadByThread, std::min(kReadByThread * threads, kReadByHost)},
          threads > 1 ? kRegionSeconds : 0.0};
}

double host_seconds(const HostWork& work, const HostRates& rates) {
  double seconds = 0.0;
  for (const WorkPhase& phase : work.phases) seconds += phase_seconds(phase, work.threads, rates);
  return seconds;
}

double host_speed(const HostWork& work, const HostRates* rates) {
  const double seconds = host_seconds(work, rates != nullptr ? *rates : default_host_rates(work.threads));
  return work.flops / seconds;
}

}  // namespace ringattn
