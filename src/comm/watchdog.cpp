// SPDX-License-Identifier: Apache-2.0
#include "comm/watchdog.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <utility>

#include "base/outcome.hpp"

namespace ringattn {

namespace {

// How long printing may take at the very end.
constexpr std::chrono::seconds kPrintGrace{1};
// Less CPU time than this between two polls is no work: a blocked thread may still be woken spuriously.
constexpr double kMinWorkSeconds = 1e-3;

}  // namespace

Watchdog::Watchdog(std::vector<const RankLiveness*> ranks, Rules rules)
    : rules_(std::move(rules)), tick_(interval(rules_.seconds)) {
  for (const RankLiveness* liveness : ranks)
    ranks_.push_back({liveness, liveness->last_heartbeat(), liveness->processor_seconds(), 0.0});
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Watchdog::arm(const Error& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = error;
  end_ = RankLiveness::Clock::now() + rules_.end_grace;
}

void Watchdog::set_grace(double seconds, double tick) {
  {
    const std::lock_guard lock(mutex_);
    grace_ = seconds;
    tick_ = tick;
  }
  changed_.notify_one();
}

double Watchdog::interval(double seconds) { return std::clamp(seconds / 8.0, 0.01, 0.25); }

void Watchdog::run() {
  bool reported = false;
  auto last = RankLiveness::Clock::now();
  std::unique_lock lock(mutex_);
  for (;;) {
    const double tick = tick_;
    changed_.wait_for(lock, std::chrono::duration<double>(tick), [&] { return ending_ || tick_ != tick; });
    if (ending_) return;
    const auto now = RankLiveness::Clock::now();
    // While this process was stopped itself, it could not see any heartbeats.
    const double passed = std::min(std::chrono::duration<double>(now - last).count(), rules_.seconds / 2.0);
    last = now;
    const std::optional<Error> failure = now >= end_ ? failure_ : std::nullopt;
    lock.unlock();
    if (failure) rules_.last_resort(*failure);
    for (Rank& rank : ranks_) {
      if (!is_silent(rank, passed) || std::exchange(reported, true)) continue;
      rules_.silent(*rank.liveness);
    }
    lock.lock();
  }
}

bool Watchdog::is_silent(Rank& rank, double passed) const {
  const auto seen = rank.liveness->last_heartbeat();
  const double processor_seconds = rank.liveness->processor_seconds();
  const bool computes = processor_counts_ && processor_seconds > rank.processor_seconds + kMinWorkSeconds;
  rank.processor_seconds = processor_seconds;
  if (!rank.liveness->is_attached() || computes || seen != rank.seen) {
    rank.seen = seen;
    rank.silence = 0.0;
    return false;
  }
  rank.silence += passed;
  return rank.silence > rules_.seconds + grace_;
}

void flush_output() {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
}

void end_with(const Error& error, const Watchdog::PrintError& print_error) noexcept {
  const int code = static_cast<int>(error.code());
  try {
    // A thread that hangs may hold a lock that printing needs.
    std::thread([code] {
      std::this_thread::sleep_for(kPrintGrace);
      end_process(code);
    }).detach();
    print_error(error);
    flush_output();
  } catch (...) {
    // The exit code still reports the failure.
  }
  end_process(code);
}

}  // namespace ringattn
