// SPDX-License-Identifier: Apache-2.0
// How long a wait may last, by kind of wait. All time limits in seconds become deadlines here. Waits that only this
// rank's own device can end use base/device_timeouts.hpp.
//
// Two mechanisms end a wait that no peer completes. Ranks of run_world() send heartbeats (base/rank_liveness.hpp), and
// every call of a rank throws once any rank has been silent for the time limit, even if another rank is waited for.
// Deadlines serve waits for parties without heartbeats. Between ranks with heartbeats, a wait is extended beyond its
// deadline while another rank works.
#pragma once

#include <chrono>

#include "base/deadline.hpp"

namespace ringattn {

class Timeouts {
 public:
  // Range of the time limit that a caller may set, in seconds.
  static constexpr double kMin = 0.001;
  static constexpr double kMax = 1e6;

  // `seconds` limits every single wait for a peer that should be ready. Throws kUsage if it is out of range. NaN is
  // refused, because it would never expire.
  explicit Timeouts(double seconds);
  // For a wait whose length follows from the limits of other waits.
  static Timeouts derived(double seconds) { return {seconds, 0}; }

  double seconds() const { return seconds_; }

  // A wait for a peer that should be ready, or for copies and other short work in flight.
  Deadline for_peer() const { return Deadline::after(seconds_); }
  // A wait for a rank or device that computes for about `estimated` seconds and may send no heartbeats meanwhile. An
  // estimate may be off by an order of magnitude, so kMargin times the estimate is added to the limit.
  Deadline for_work(double estimated) const { return Deadline::after(seconds_ + kMargin * estimated); }

  // A deadline that has already passed, for waits that return at once.
  static Deadline none() { return Deadline::after(0.0); }

  // Parts of a wait that has its own deadline. When one of these expires, the wait continues with the next address or
  // connection, and nothing fails. They limit connecting to an address, the introduction of a connected but perhaps
  // busy peer, and the pause before addresses are retried, because a peer that refused may be about to listen.
  static Deadline for_address() { return Deadline::after(kAddressSeconds); }
  static Deadline for_answer() { return Deadline::after(kAnswerSeconds); }
  static Deadline for_next_try() { return Deadline::after(kBetweenTries.count()); }
  static constexpr std::chrono::duration<double> kBetweenTries{0.05};

  // The time that a rank that ends, or gives something up, grants work in flight. Afterwards it continues without that
  // work, and nothing fails.
  static Deadline grace(double seconds) { return Deadline::after(seconds); }

 private:
  Timeouts(double seconds, int) : seconds_(seconds) {}

  static constexpr double kMargin = 10.0;
  static constexpr double kAddressSeconds = 3.0;
  static constexpr double kAnswerSeconds = 10.0;

  double seconds_;
};

// Returns true if the calling rank must give up a wait: its deadline has passed, and no other rank has worked within
// the deadline's length. Work extends a wait only up to a maximum.
bool wait_expired(const Deadline& deadline);

}  // namespace ringattn
