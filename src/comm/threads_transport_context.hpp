// SPDX-License-Identifier: Apache-2.0
// Inside transport `threads`: exchanges in flight, and the state that a world shares with the worlds split from it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/delayed_delivery.hpp"
#include "comm/exchange.hpp"
#include "comm/threads.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

// An exchange that one rank has posted. Guarded by the mutex of its context.
struct ThreadsFlight {
  struct Send {
    std::shared_ptr<ThreadsFlight> to;  // the receiver's flight, from when both have posted until delivery
    std::size_t receive = 0;            // index of the receive in it
    bool started = false;
    bool done = false;
  };

  ThreadsFlight(Exchange posted, int poster, Ticket number)
      : exchange(std::move(posted)),
        rank(poster),
        ticket(number),
        gate(exchange.receives),
        sends(exchange.sends.size()),
        received(exchange.receives.size()),
        open(sends.size() + received.size()) {}

  const Exchange exchange;
  const int rank;
  const Ticket ticket;
  RoundGate gate;
  std::vector<Send> sends;     // [exchange.sends]
  std::vector<bool> received;  // [exchange.receives]
  std::size_t open;            // messages not done yet, in both directions
  int copying = 0;             // deliveries that are accessing its spans
  bool withdrawn = false;      // its spans may be freed
};

// The mutex, the condition variables, the abort state and the deliveries that a world and its splits share. Ranks of a
// split world keep their numbers.
class ThreadsTransportContext {
 public:
  ThreadsTransportContext(int size, const ThreadsDelivery& delivery);

  std::mutex mutex;

  const ThreadsDelivery& delivery() const { return delivery_; }

  // Blocks `rank` until `done()`. Returns false when wait_expired(deadline). Throws once the world is aborted or a rank
  // is silent.
  template <typename Done>
  bool wait(std::unique_lock<std::mutex>& lock, int rank, const Deadline& deadline, Done done) {
    const auto over = [&] { return aborted_ || done(); };
    for (;;) {
      waiting_heartbeat();
      const auto next = Deadline::Clock::now() + kPollInterval;
      const auto until = deadline.expired() ? next : std::min(next, deadline.end());
      if (wake_[static_cast<std::size_t>(rank)].wait_until(lock, until, over) || wait_expired(deadline)) break;
    }
    check_alive_locked();
    return done();
  }
  // Waits without a deadline until no delivery accesses the flights of `rank` any more, which takes one copy at most.
  template <typename Done>
  void wait_for_deliveries(std::unique_lock<std::mutex>& lock, int rank, Done done) {
    wake_[static_cast<std::size_t>(rank)].wait(lock, done);
  }
  void notify(int rank) { wake_[static_cast<std::size_t>(rank)].notify_all(); }

  bool abort(int rank, const Error& error);
  void check_alive_locked() const {
    if (aborted_) fail_rank(*aborted_);
  }
  // The same for callers that don't hold the mutex. It does not lock the mutex unless the world has failed.
  void check_alive();

  // Submits the sends that may start to the delivery threads.
  void start_sends(const std::shared_ptr<ThreadsFlight>& flight);

 private:
  // How often a waiting rank polls.
  static constexpr std::chrono::milliseconds kPollInterval{50};

  struct Schedule {
    DelayedDelivery::Clock::time_point due;
    std::uint64_t priority;
  };

  Schedule schedule_of(const ThreadsFlight& flight, const SendMessage& message);
  void deliver(ThreadsFlight& from, std::size_t index);

  const ThreadsDelivery delivery_;
  std::deque<std::condition_variable> wake_;  // [ranks]
  std::optional<Error> aborted_;
  std::atomic<bool> over_{false};  // aborted_ is set
  std::uint64_t next_priority_ = 0;
  DelayedDelivery delayed_delivery_;  // last, because its threads use all of the above
};

}  // namespace ringattn
