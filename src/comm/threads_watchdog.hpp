// SPDX-License-Identifier: Apache-2.0
// The liveness of ranks that are threads of this process, and the watchdog that fails their world when one of them
// hangs.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>

#include "base/rank_liveness.hpp"
#include "comm/threads.hpp"
#include "comm/watchdog.hpp"

namespace ringattn {

class ThreadsWatchdog {
 public:
  ThreadsWatchdog(int size, const RanksLimit& limit);

  RankLiveness& liveness(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

 private:
  class ThreadLiveness final : public RankLiveness {
   public:
    ThreadLiveness(ThreadsWatchdog& watchdog, int rank) : RankLiveness(rank), watchdog_(watchdog) {}

    bool others_are_working(double seconds) const override { return watchdog_.others_are_working(rank(), seconds); }
    double detection_seconds() const override { return watchdog_.detection_seconds(); }
    void on_failure(const Error& error) noexcept override { watchdog_.watchdog_->arm(error); }

   private:
    void on_heartbeat() override { watchdog_.check(); }

    ThreadsWatchdog& watchdog_;
  };

  bool others_are_working(int rank, double seconds) const;
  // Three polling intervals, one of which is for the other ranks to notice.
  double detection_seconds() const { return 3.0 * Watchdog::interval(seconds_); }
  void fell_silent(int rank);
  // Throws once a rank is silent.
  void check();

  const double seconds_;
  std::deque<ThreadLiveness> ranks_;  // [ranks]
  std::mutex mutex_;
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};   // failure_ is set
  std::optional<Watchdog> watchdog_;  // last, because its thread uses all of the above
};

}  // namespace ringattn
