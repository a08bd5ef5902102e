// SPDX-License-Identifier: Apache-2.0
// Transport `threads`: N ranks are N threads of this process. Delivery threads copy the bytes, so delivery is as
// asynchronous as a network's; tests delay and shuffle it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

// How a threads world delivers; the default copies each message as soon as both sides have posted it.
struct ThreadsDelivery {
  Route route = Route::kDirect;
  std::uint64_t shuffle_seed = 0;          // not 0: messages that are ready are delivered in a seeded random order
  std::chrono::microseconds max_delay{0};  // each message waits a seeded random time up to this
};

// The transports of a world of `size` ranks; element r is for the thread that plays rank r. They share what they need:
// the world lives until the last of them is gone.
std::vector<std::unique_ptr<Transport>> make_threads_world(int size, const ThreadsDelivery& delivery = {});

// What becomes of ranks that don't come to an end.
struct RanksLimit {
  double seconds;  // without a sign of life (base/rank_liveness.hpp), after which a rank is silent and all others throw
                   // kPeer
  // Called on a thread of its own with the world's failure, when a rank has not ended seconds after it. Must end the
  // process: a thread can't be ended alone.
  std::function<void(const Error&)> last_resort;
};

// Runs `rank_main` on one thread for each transport of a world. When a rank throws, the world is aborted; after all
// have ended the error that came first is rethrown. Without a limit, ranks may hang for ever.
void run_ranks(std::vector<std::unique_ptr<Transport>> transports, const std::function<void(Transport&)>& rank_main,
               const RanksLimit* limit = nullptr);

// Both in one.
void run_threads_world(int size, const ThreadsDelivery& delivery, const std::function<void(Transport&)>& rank_main);

}  // namespace ringattn
