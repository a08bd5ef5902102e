// SPDX-License-Identifier: Apache-2.0
// A lock for what one thread makes and others of the process share, which may take minutes.
#pragma once

#include <chrono>
#include <mutex>
#include <thread>

#include "base/rank_liveness.hpp"

namespace ringattn {

// Holds `mutex`. A rank that waits for it shows that it goes on, so that no other one takes it for silent; it may throw
// as waiting_heartbeat() does.
inline std::unique_lock<std::mutex> lock_with_heartbeat(std::mutex& mutex) {
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock.owns_lock() && !lock.try_lock()) {
    waiting_heartbeat();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return lock;
}

}  // namespace ringattn
