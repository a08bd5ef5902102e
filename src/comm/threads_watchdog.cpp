// SPDX-License-Identifier: Apache-2.0
#include "comm/threads_watchdog.hpp"

#include <algorithm>
#include <vector>

#include "comm/failure.hpp"

namespace ringattn {

namespace {

// A thread that hangs can't be ended, so last_resort() prints the world's message. It runs within 5 s of the time
// limit.
constexpr std::chrono::seconds kEndGrace{4};

}  // namespace

ThreadsWatchdog::ThreadsWatchdog(int size, const RanksLimit& limit) : seconds_(limit.seconds) {
  std::vector<const RankLiveness*> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(&ranks_.emplace_back(*this, rank));
  watchdog_.emplace(std::move(ranks),
                    Watchdog::Rules{limit.seconds, [this](const RankLiveness& rank) { fell_silent(rank.rank()); },
                                    limit.last_resort, kEndGrace});
}

bool ThreadsWatchdog::others_are_working(int rank, double seconds) const {
  const auto now = RankLiveness::Clock::now();
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const ThreadLiveness& other) {
    return other.rank() != rank && other.is_attached() &&
           std::chrono::duration<double>(now - other.last_work()).count() <=
               std::min(seconds, seconds_) + detection_seconds();
  });
}

void ThreadsWatchdog::fell_silent(int rank) {
  const int silent[] = {rank};
  const Error error = silent_error(RankNames(), silent, seconds_);
  {
    const std::lock_guard lock(mutex_);
    failure_ = error;
    failed_.store(true, std::memory_order_release);
  }
  // The rank may never return.
  watchdog_->arm(error);
}

void ThreadsWatchdog::check() {
  if (!failed_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  throw Error(*failure_);
}

}  // namespace ringattn
