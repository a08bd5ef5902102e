// SPDX-License-Identifier: Apache-2.0
// A rank's pulse: how the thread that is a rank shows that it goes on. It beats between two pieces of its work and
// looks up between two polls of a wait; what that means to other ranks, comm knows. A thread without a pulse does
// neither.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>

#include "base/error.hpp"

namespace ringattn {

class Pulse {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Pulse(int rank);
  virtual ~Pulse() = default;
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  int rank() const { return rank_; }

  // The rank has worked since its last sign, or only waited. Both throw kPeer once another rank is silent.
  void beat();
  void look();

  // When the last sign of either kind was, and the last beat.
  Clock::time_point seen() const { return time_of(seen_); }
  Clock::time_point worked() const { return time_of(worked_); }
  // Whether this is a thread's pulse at the moment.
  bool is_worn() const { return worn_; }
  // Seconds of processor time that its thread has used; 0 where that isn't known.
  double processor_seconds() const;

  // Whether another rank has worked within these seconds, or within those after which a rank is silent.
  virtual bool others_work(double) const { return false; }
  // How much later than that it may notice that another rank is silent. A wait that gives up by itself does so later
  // still: it knows whom it waits for, and not for whom that rank does.
  virtual double noticing_seconds() const { return 0.0; }
  // The first sign that this rank is going to fail, before its stack unwinds.
  virtual void failing(const Error&) noexcept {}

  // The calling thread's; nullptr: it has none.
  static Pulse* current();

 protected:
  // What a sign does besides being noted; on the rank's own thread.
  virtual void exchange() {}

 private:
  friend class PulseScope;

  static Clock::time_point time_of(const std::atomic<Clock::rep>& ticks) {
    return Clock::time_point(Clock::duration(ticks.load()));
  }

  const int rank_;
  std::atomic<Clock::rep> seen_;
  std::atomic<Clock::rep> worked_;
  std::atomic<bool> worn_{false};
  std::atomic<clockid_t> processor_clock_{};
};

// While it lives, `pulse` is the calling thread's.
class PulseScope {
 public:
  explicit PulseScope(Pulse& pulse);
  ~PulseScope();
  PulseScope(const PulseScope&) = delete;
  PulseScope& operator=(const PulseScope&) = delete;

 private:
  Pulse& pulse_;
};

// The same of the calling thread's pulse, if it has one. Not from inside a parallel region: they may throw.
void beat();
void look();

// Throws `error`, having said so to the calling thread's pulse.
[[noreturn]] void fail_with_pulse(const Error& error);

}  // namespace ringattn
