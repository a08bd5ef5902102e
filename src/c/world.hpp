// SPDX-License-Identifier: Apache-2.0
// What a ringattn_world is, and how calls on it take turns.
#pragma once

#include <atomic>
#include <memory>

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

// The backend whose kernels work in the world's memory: "cpu", "cuda".
const char* backend_of(const Transport& transport);

}  // namespace ringattn::c
