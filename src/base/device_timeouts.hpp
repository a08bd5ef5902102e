// SPDX-License-Identifier: Apache-2.0
// How long a wait for the own device's work may last, by what is waited for: the one place for such limits. Waits that
// peers have a part in follow comm/timeouts.hpp.
//
// A device gives no signs of life, so a wait can't tell one that works from one that is stuck. What it knows is who
// made the work.
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

  // A wait for whatever is in a queue. That may be its callers' work, or other programs' that share the device, and is
  // as long as they made it: hours of it are no failure. A device that is stuck ends the wait all the same. Whoever
  // waits so keeps looking after what has a deadline of its own.
  static Deadline for_queue() { return Deadline::after(kQueueSeconds); }
  // A wait for work that the one who waits has just made, of milliseconds, in a queue of the library's own.
  static Deadline for_short_work() { return Deadline::after(kShortWorkSeconds); }
  // A wait for an answer that may not come, for which other ranks wait up to `seconds`: it is over before they are.
  static Deadline for_probe(double seconds) { return Deadline::after(std::min(kProbeSeconds, seconds)); }

  // Throws kPeer past the deadline of a wait that ends by the device alone. `why`: what is known of it.
  static void check(const Deadline& deadline, const std::string& why);
};

}  // namespace ringattn
