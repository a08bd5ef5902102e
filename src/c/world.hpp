// SPDX-License-Identifier: Apache-2.0
// What a ringattn_world is, and how calls on it take turns.
#pragma once

#include <atomic>
#include <memory>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "c/ringattn.h"
#include "comm/transport.hpp"

// Objects on a world share its transport, so that they may outlive it.
struct ringattn_world {
  std::shared_ptr<ringattn::Transport> transport;
  // Whether a call on the world, or on an object of it, is under way.
  std::shared_ptr<std::atomic<bool>> busy = std::make_shared<std::atomic<bool>>(false);
};

namespace ringattn::c {

// A call on a world, as long as it lives. Two at a time would mix their messages to the other ranks.
class Turn {
 public:
  // Throws kUsage where another thread's call is under way.
  explicit Turn(const std::shared_ptr<std::atomic<bool>>& busy);
  ~Turn() { busy_.store(false, std::memory_order_release); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& busy_;
};

// Runs body(). Where its caller interrupts it, other ranks learn that this one won't come.
template <class Body>
void interruptible(Transport& transport, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (was_interrupted() && transport.size() > 1) transport.abort(error);
    throw;
  }
}

// The backend whose kernels work in the world's memory: "cpu", "cuda".
const char* backend_of(const Transport& transport);

}  // namespace ringattn::c
