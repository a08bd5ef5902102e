// SPDX-License-Identifier: Apache-2.0
// The pulses of ranks that are threads of this process, and the watch that ends their world where one of them hangs.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>

#include "base/pulse.hpp"
#include "comm/threads.hpp"
#include "comm/watch.hpp"

namespace ringattn {

class ThreadsWatch {
 public:
  ThreadsWatch(int size, const RanksLimit& limit);

  Pulse& pulse(int rank) { return pulses_[static_cast<std::size_t>(rank)]; }

 private:
  class RankPulse final : public Pulse {
   public:
    RankPulse(ThreadsWatch& watch, int rank) : Pulse(rank), watch_(watch) {}

    bool others_work(double seconds) const override { return watch_.works_besides(rank(), seconds); }
    double noticing_seconds() const override { return watch_.noticing_seconds(); }
    void failing(const Error& error) noexcept override { watch_.watch_->arm(error); }

   private:
    void exchange() override { watch_.check(); }

    ThreadsWatch& watch_;
  };

  bool works_besides(int rank, double seconds) const;
  double noticing_seconds() const { return 3.0 * Watch::interval(seconds_); }  // one of them is the others' to hear it
  void fell_silent(int rank);
  // Throws once a rank is silent.
  void check();

  const double seconds_;
  std::deque<RankPulse> pulses_;  // [ranks]
  std::mutex mutex_;
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};  // whether failure_ is set
  std::optional<Watch> watch_;       // last: its thread uses all of the above
};

}  // namespace ringattn
