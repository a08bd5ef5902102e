// SPDX-License-Identifier: Apache-2.0
// A ringattn_world, and exclusive access to it.
#pragma once

#include <atomic>
#include <memory>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "c/ringattn.h"
#include "comm/transport.hpp"

// Objects share the transport of their world, so they may outlive the world.
struct ringattn_world {
  std::shared_ptr<ringattn::Transport> transport;
  // True while a call on the world or on one of its objects runs.
  std::shared_ptr<std::atomic<bool>> busy = std::make_shared<std::atomic<bool>>(false);
};

namespace ringattn::c {

// Exclusive use of a world for the duration of a call. Concurrent calls would mix their messages to other ranks.
class ExclusiveUse {
 public:
  // Throws kUsage if another thread's call is running.
  explicit ExclusiveUse(const std::shared_ptr<std::atomic<bool>>& busy);
  ~ExclusiveUse() { busy_.store(false, std::memory_order_release); }
  ExclusiveUse(const ExclusiveUse&) = delete;
  ExclusiveUse& operator=(const ExclusiveUse&) = delete;

 private:
  std::atomic<bool>& busy_;
};

// Runs body(). If the caller's poll() interrupts it, reports the failure to the other ranks.
template <class Body>
void interruptible(Transport& transport, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (was_interrupted() && transport.size() > 1) transport.abort(error);
    throw;
  }
}

// The backend of the world's memory: "cpu" or "cuda".
const char* backend_of(const Transport& transport);

}  // namespace ringattn::c
