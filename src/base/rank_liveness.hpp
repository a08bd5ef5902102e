// SPDX-License-Identifier: Apache-2.0
// A rank's liveness: how the thread that is a rank shows that it goes on. It beats between two pieces of its work and
// looks up between two polls of a wait; what that means to other ranks, comm knows. A thread without a liveness does
// neither.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>

#include "base/error.hpp"

namespace ringattn {

class RankLiveness {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RankLiveness(int rank);
  virtual ~RankLiveness() = default;
  RankLiveness(const RankLiveness&) = delete;
  RankLiveness& operator=(const RankLiveness&) = delete;

  int rank() const { return rank_; }

  // The rank has worked since its last sign, or only waited. Both throw kPeer once another rank is silent.
  void heartbeat();
  void waiting_heartbeat();

  // When the last sign of either kind was, and the last beat.
  Clock::time_point last_heartbeat() const { return time_of(last_heartbeat_); }
  Clock::time_point last_work() const { return time_of(last_work_); }
  // Whether this is a thread's liveness at the moment.
  bool is_attached() const { return attached_; }
  // Seconds of processor time that its thread has used; 0 where that isn't known.
  double processor_seconds() const;

  // Whether another rank has worked within these seconds, or within those after which a rank is silent.
  virtual bool others_are_working(double) const { return false; }
  // How much later than that it may notice that another rank is silent. A wait that gives up by itself does so later
  // still: it knows whom it waits for, and not for whom that rank does.
  virtual double detection_seconds() const { return 0.0; }
  // The first sign that this rank is going to fail, before its stack unwinds.
  virtual void on_failure(const Error&) noexcept {}

  // The calling thread's; nullptr: it has none.
  static RankLiveness* current();

 protected:
  // What a sign does besides being noted; on the rank's own thread.
  virtual void on_heartbeat() {}

 private:
  friend class RankLivenessScope;

  static Clock::time_point time_of(const std::atomic<Clock::rep>& ticks) {
    return Clock::time_point(Clock::duration(ticks.load()));
  }

  const int rank_;
  std::atomic<Clock::rep> last_heartbeat_;
  std::atomic<Clock::rep> last_work_;
  std::atomic<bool> attached_{false};
  std::atomic<clockid_t> processor_clock_{};
};

// While it lives, `liveness` is the calling thread's.
class RankLivenessScope {
 public:
  explicit RankLivenessScope(RankLiveness& liveness);
  ~RankLivenessScope();
  RankLivenessScope(const RankLivenessScope&) = delete;
  RankLivenessScope& operator=(const RankLivenessScope&) = delete;

 private:
  RankLiveness& liveness_;
};

// The same of the calling thread's liveness, if it has one. Not from inside a parallel region: they may throw.
void heartbeat();
void waiting_heartbeat();

// Throws `error`, having said so to the calling thread's liveness.
[[noreturn]] void fail_rank(const Error& error);

}  // namespace ringattn
