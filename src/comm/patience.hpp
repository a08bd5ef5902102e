// SPDX-License-Identifier: Apache-2.0
// How long a wait may last, by what is waited for: the one place where a time limit in seconds becomes deadlines.
#pragma once

#include "base/deadline.hpp"

namespace ringattn {

class Patience {
 public:
  // `seconds`: of every single wait for a peer that should be ready.
  explicit Patience(double seconds) : seconds_(seconds) {}

  // The `predicted` seconds of a phase that reads or writes files: disks and file servers that are busy take their
  // time, which is no peer's death.
  static constexpr double kDisk = 60.0;

  double seconds() const { return seconds_; }

  // A wait for a peer that should be ready, or for copies and other short work that is on its way.
  Deadline for_peer() const { return Deadline::after(seconds_); }
  // A wait for a rank or a device that computes for about `predicted` seconds. A prediction may be an order of
  // magnitude off; only what takes longer still is late.
  Deadline for_work(double predicted) const { return Deadline::after(seconds_ + kMargin * predicted); }

  // A wait for work of others in the same queue, which is as long as it is. Whoever waits so keeps looking after what
  // has a deadline of its own.
  static Deadline endless() { return Deadline::after(Deadline::kLongest); }

 private:
  static constexpr double kMargin = 10.0;

  double seconds_;
};

}  // namespace ringattn
