// SPDX-License-Identifier: Apache-2.0
// Transport `threads`: N ranks are N threads of this process. Delivery threads copy the bytes, so delivery is as
// asynchronous as over a network. Tests delay and shuffle it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

// How a threads world delivers messages. By default each message is copied as soon as both sides have posted it.
struct ThreadsDelivery {
  Route route = Route::kDirect;
  std::uint64_t shuffle_seed = 0;          // nonzero: messages that are ready are delivered in a seeded random order
  std::chrono::microseconds max_delay{0};  // each message waits a seeded random time up to this
};

// The transports of a world of `size` ranks. Element r is for the thread that runs rank r. They share the world, which
// lives until the last of them is destroyed.
std::vector<std::unique_ptr<Transport>> make_threads_world(int size, const ThreadsDelivery& delivery = {});

// Limits on ranks that stop making progress.
struct RanksLimit {
  double seconds;  // without a heartbeat (base/rank_liveness.hpp) until a rank is silent and all others throw kPeer
  // Called on a separate thread with the world's failure if a rank has not ended some seconds after it. Must end the
  // process, because a single thread can't be ended.
  std::function<void(const Error&)> last_resort;
};

// Runs `rank_main` on one thread for each transport of a world. When a rank throws, the world is aborted. After all
// threads have ended, the first error is rethrown. Without a limit, ranks may hang for ever.
void run_ranks(std::vector<std::unique_ptr<Transport>> transports, const std::function<void(Transport&)>& rank_main,
               const RanksLimit* limit = nullptr);

// make_threads_world() and run_ranks() in one call.
void run_threads_world(int size, const ThreadsDelivery& delivery, const std::function<void(Transport&)>& rank_main);

}  // namespace ringattn
