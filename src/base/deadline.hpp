// SPDX-License-Identifier: Apache-2.0
// A point in time after which a wait gives up. Every wait of the runtime has one.
#pragma once

#include <chrono>

namespace ringattn {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Estimated durations may be arbitrarily large. About 30 years stands for no limit and does not overflow the clock.
  static constexpr double kMaxSeconds = 1e9;

  static Deadline after(double seconds) {
    if (!(seconds < kMaxSeconds)) seconds = kMaxSeconds;
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)),
                    seconds);
  }

  bool expired() const { return Clock::now() >= end_; }
  // Seconds since the deadline passed; negative before.
  double overdue() const { return std::chrono::duration<double>(Clock::now() - end_).count(); }
  Clock::time_point end() const { return end_; }
  // The seconds that the wait was allowed to last, for messages.
  double seconds() const { return seconds_; }

 private:
  Deadline(Clock::time_point end, double seconds) : end_(end), seconds_(seconds) {}

  Clock::time_point end_;
  double seconds_;
};

}  // namespace ringattn
