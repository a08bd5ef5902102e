// SPDX-License-Identifier: Apache-2.0
// How the thread that runs a rank shows that it makes progress. The thread calls heartbeat() between two steps of its
// work and waiting_heartbeat() between two polls of a wait. comm/ reports these heartbeats to other ranks. On a thread
// without a liveness both only poll for an interrupt.
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

  // Records that the rank has worked since its last heartbeat, or that it has only waited. Both throw kPeer once
  // another rank is silent.
  void heartbeat();
  void waiting_heartbeat();

  // The time of the last heartbeat of either kind, and of the last one after work.
  Clock::time_point last_heartbeat() const { return time_of(last_heartbeat_); }
  Clock::time_point last_work() const { return time_of(last_work_); }
  // True while a RankLivenessScope makes this a thread's liveness.
  bool is_attached() const { return attached_; }
  // Seconds of CPU time that its thread has used; 0 if unknown.
  double processor_seconds() const;

  // True if another rank has worked within the last `seconds`, capped at the time after which a rank is silent.
  virtual bool others_are_working(double) const { return false; }
  // Seconds after that time within which this rank detects that another one is silent. A wait that times out by itself
  // does so later still, because it knows only the rank that it waits for, not the rank that one waits for in turn.
  virtual double detection_seconds() const { return 0.0; }
  // Called when this rank is about to fail, before its stack unwinds.
  virtual void on_failure(const Error&) noexcept {}

  // The calling thread's liveness, or nullptr.
  static RankLiveness* current();

 protected:
  // Called on the rank's own thread for each heartbeat.
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

// Makes `liveness` the calling thread's while this object lives.
class RankLivenessScope {
 public:
  explicit RankLivenessScope(RankLiveness& liveness);
  ~RankLivenessScope();
  RankLivenessScope(const RankLivenessScope&) = delete;
  RankLivenessScope& operator=(const RankLivenessScope&) = delete;

 private:
  RankLiveness& liveness_;
};

// Call the same function of the calling thread's liveness, if it has one, after poll_interrupt(). They may throw, so
// don't call them inside an OpenMP parallel region.
void heartbeat();
void waiting_heartbeat();

// Calls on_failure() of the calling thread's liveness and throws `error`.
[[noreturn]] void fail_rank(const Error& error);

}  // namespace ringattn
