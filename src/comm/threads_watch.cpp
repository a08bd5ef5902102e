// SPDX-License-Identifier: Apache-2.0
#include "comm/threads_watch.hpp"

#include <algorithm>
#include <vector>

#include "comm/failure.hpp"

namespace ringattn {

namespace {

// A thread that hangs can't be left behind, so the world's message is that of the last resort. It comes within 5 s of
// the time limit.
constexpr std::chrono::seconds kEndGrace{4};

}  // namespace

ThreadsWatch::ThreadsWatch(int size, const RanksLimit& limit) : seconds_(limit.seconds) {
  std::vector<const Pulse*> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(&pulses_.emplace_back(*this, rank));
  watch_.emplace(std::move(ranks), Watch::Rules{limit.seconds, [this](const Pulse& rank) { fell_silent(rank.rank()); },
                                                limit.last_resort, kEndGrace});
}

bool ThreadsWatch::works_besides(int rank, double seconds) const {
  const auto now = Pulse::Clock::now();
  return std::any_of(pulses_.begin(), pulses_.end(), [&](const RankPulse& other) {
    return other.rank() != rank && other.is_worn() &&
           std::chrono::duration<double>(now - other.worked()).count() <=
               std::min(seconds, seconds_) + noticing_seconds();
  });
}

void ThreadsWatch::fell_silent(int rank) {
  const int silent[] = {rank};
  const Error error = silent_error(RankNames(), silent, seconds_);
  {
    const std::lock_guard lock(mutex_);
    failure_ = error;
    failed_.store(true, std::memory_order_release);
  }
  // The rank may never come back.
  watch_->arm(error);
}

void ThreadsWatch::check() {
  if (!failed_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  throw Error(*failure_);
}

}  // namespace ringattn
