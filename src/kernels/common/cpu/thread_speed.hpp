// SPDX-License-Identifier: Apache-2.0
// The speed of several threads relative to that of one, for default speed estimates of CPU kernels.
#pragma once

#include <algorithm>
#include <cmath>

namespace ringattn::cpu {

// How many cores `threads` threads are worth: two threads often share a core.
inline double cores_of_threads(int threads) { return 0.55 * threads + 0.45; }

// The same if they process `items` work items of equal length. With few items some threads have none, and in the last
// round some are idle if the number of items is not a multiple of the number of threads.
inline double cores_of_items(int threads, double items) {
  const double busy = std::min(static_cast<double>(threads), std::max(1.0, items));
  const double rounds = std::ceil(items / busy);
  return cores_of_threads(static_cast<int>(busy)) * std::max(1.0, items) / (busy * std::max(1.0, rounds));
}

}  // namespace ringattn::cpu
