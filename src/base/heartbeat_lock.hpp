// SPDX-License-Identifier: Apache-2.0
// A mutex for values that one thread computes, perhaps for minutes, and other threads of the process share.
#pragma once

#include <chrono>
#include <mutex>
#include <thread>

#include "base/rank_liveness.hpp"

namespace ringattn {

// Locks `mutex`. A rank that waits for it sends heartbeats, so that other ranks do not take it for silent. Throws as
// waiting_heartbeat() does.
inline std::unique_lock<std::mutex> lock_with_heartbeat(std::mutex& mutex) {
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock.owns_lock() && !lock.try_lock()) {
    waiting_heartbeat();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return lock;
}

}  // namespace ringattn
