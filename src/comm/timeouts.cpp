// SPDX-License-Identifier: Apache-2.0
#include "comm/timeouts.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

// How far work may extend a wait beyond its deadline: one hour plus this many times the deadline's length. Reading a
// large input on one slow host takes less, and a rank in an endless loop can't block the others for ever.
constexpr double kExtraSeconds = 3600.0;
constexpr double kExtraLengths = 100.0;

}  // namespace

Timeouts::Timeouts(double seconds) : seconds_(seconds) {
  if (seconds >= kMin && seconds <= kMax) return;
  fail(ErrorCode::kUsage, fmt::format("a time limit of {} seconds is not possible", seconds),
       fmt::format("it has {} to {:.0f}", kMin, kMax), {"Choose one in between for ", setting("timeout"), "."});
}

bool wait_expired(const Deadline& deadline) {
  const double overdue = deadline.overdue();
  const RankLiveness* const liveness = RankLiveness::current();
  if (overdue < (liveness != nullptr ? liveness->detection_seconds() : 0.0)) return false;
  const bool extended = liveness != nullptr && liveness->others_are_working(deadline.seconds());
  return !extended || overdue > kExtraSeconds + kExtraLengths * deadline.seconds();
}

}  // namespace ringattn
