// SPDX-License-Identifier: Apache-2.0
// The speed of several threads relative to that of one, for default speed estimates of CPU kernels.
#pragma once

#include <algorithm>
#include <cmath>

namespace ringattn::cpu {

// Cores that `threads` threads are worth: two of them often share one.
inline double cores_of_threads(int threads) { return 0.55 * threads + 0.45; }

// The same if they divide `items` work items of equal length: some threads have none if items are few, and in the last
// round if their number is no multiple of the threads.
inline double cores_of_items(int threads, double items) {
  const double busy = std::min(static_cast<double>(threads), std::max(1.0, items));
  const double rounds = std::ceil(items / busy);
  return cores_of_threads(static_cast<int>(busy)) * std::max(1.0, items) / (busy * std::max(1.0, rounds));
}

}  // namespace ringattn::cpu
