// SPDX-License-Identifier: Apache-2.0
// How long a wait for this rank's own device may last, by kind of wait. All such limits are defined here. Waits that
// involve peers use comm/timeouts.hpp.
//
// A device sends no heartbeats, so a wait can't tell a busy device from a stuck one. The limit therefore depends on who
// enqueued the work.
#pragma once

#include <algorithm>
#include <string>

#include "base/deadline.hpp"
#include "base/error.hpp"

namespace ringattn {

class DeviceTimeouts {
 public:
  static constexpr double kQueueSeconds = 24.0 * 3600.0;
  static constexpr double kShortWorkSeconds = 60.0;
  static constexpr double kProbeSeconds = 10.0;

  // For everything that is enqueued on a stream. That may include the caller's own work and that of other programs on
  // the device, which may legitimately take hours. A stuck device still ends the wait. The waiting thread keeps polling
  // whatever has a deadline of its own.
  static Deadline for_queue() { return Deadline::after(kQueueSeconds); }
  // For work of some milliseconds that the waiting thread has just enqueued on one of the library's own streams.
  static Deadline for_short_work() { return Deadline::after(kShortWorkSeconds); }
  // For an answer that may never come, while other ranks wait up to `seconds`: this wait ends before theirs.
  static Deadline for_probe(double seconds) { return Deadline::after(std::min(kProbeSeconds, seconds)); }

  // Throws kPeer if `deadline` has passed, for a wait that only the device can end. `why` is the reason shown in the
  // message.
  static void check(const Deadline& deadline, const std::string& why);
};

}  // namespace ringattn
