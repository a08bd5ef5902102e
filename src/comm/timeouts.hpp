// SPDX-License-Identifier: Apache-2.0
// How long a wait may last, by what is waited for: the one place where a time limit in seconds becomes deadlines. Waits
// for the own device alone have theirs in base/device_timeouts.hpp.
//
// Two things end a wait that its peers don't. Ranks of run_world() give signs of life (base/rank_liveness.hpp), and
// every call of a rank throws once one of them is silent for as long as the limit, whoever is waited for. A deadline is
// for what gives no signs; between ranks that do, a wait outlasts it while one of them works.
#pragma once

#include <chrono>

#include "base/deadline.hpp"

namespace ringattn {

class Timeouts {
 public:
  // What a caller may ask for.
  static constexpr double kMin = 0.001;
  static constexpr double kMax = 1e6;

  // `seconds`: of every single wait for a peer that should be ready, as a caller asked for it. Throws kUsage for what
  // is no such time: NaN would be waited for without an end.
  explicit Timeouts(double seconds);
  // Of a wait whose length follows from others'.
  static Timeouts derived(double seconds) { return {seconds, 0}; }

  double seconds() const { return seconds_; }

  // A wait for a peer that should be ready, or for copies and other short work that is on its way.
  Deadline for_peer() const { return Deadline::after(seconds_); }
  // A wait for a rank or a device that computes for about `estimated` seconds and may give no signs meanwhile. A
  // prediction may be an order of magnitude off; only what takes longer still is late.
  Deadline for_work(double estimated) const { return Deadline::after(seconds_ + kMargin * estimated); }

  // What has happened already.
  static Deadline none() { return Deadline::after(0.0); }

  // Steps of a wait that has a deadline of its own: who is later is passed over or tried again, and nothing fails. An
  // address that doesn't answer; who is connected, and may be too busy to say who it is; and the moment before
  // addresses are tried anew, as what refused may be about to listen.
  static Deadline for_address() { return Deadline::after(kAddressSeconds); }
  static Deadline for_answer() { return Deadline::after(kAnswerSeconds); }
  static Deadline for_next_try() { return Deadline::after(kBetweenTries.count()); }
  static constexpr std::chrono::duration<double> kBetweenTries{0.05};

  // What a rank that ends, or gives something up, grants what is still on its way. When it is over the rank goes on
  // without that, and nothing fails for it.
  static Deadline grace(double seconds) { return Deadline::after(seconds); }

 private:
  Timeouts(double seconds, int) : seconds_(seconds) {}

  static constexpr double kMargin = 10.0;
  static constexpr double kAddressSeconds = 3.0;
  static constexpr double kAnswerSeconds = 10.0;

  double seconds_;
};

// Whether a wait of the calling rank is to be given up: its deadline has passed, and no other rank has worked for as
// long as that. Work that never ends doesn't extend it for ever.
bool wait_expired(const Deadline& deadline);

}  // namespace ringattn
