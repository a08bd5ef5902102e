// SPDX-License-Identifier: Apache-2.0
// A thread that watches the ranks of this process and ends it where they can't: a rank that hangs in a call without a
// deadline (of MPI, of a file system, of a driver), and a failure whose unwinding hangs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

class Watchdog {
 public:
  using PrintError = std::function<void(const Error&)>;

  struct Rules {
    double seconds;  // without a sign of life, after which a rank is silent
    // Called once, on the watchdog's thread, with the rank that is silent.
    std::function<void(const RankLiveness&)> silent;
    // Called on the watchdog's thread when a failure has not ended the watchdog in time; doesn't return.
    std::function<void(const Error&)> last_resort;
    // How long a failed rank gets to unwind, to tell the others and to leave.
    std::chrono::seconds end_grace{5};
  };

  // `ranks` outlive the object. They are watched while they are worn.
  Watchdog(std::vector<const RankLiveness*> ranks, Rules rules);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // How often it looks, in seconds, where a rank is silent after `seconds`: seldom enough to cost nothing, often enough
  // to be exact.
  static double interval(double seconds);

  // From now on the process has a few seconds to end by itself. Only the first call counts.
  void arm(const Error& error) noexcept;

  // Whether using the processor is a sign of life, as it is of a rank that computes (it is at first). Calls of MPI
  // that wait for other processes use it too.
  void set_processor_counts(bool counts) { processor_counts_ = counts; }

  // A rank is silent `seconds` later than the rules say (0 at first). From now on the watchdog looks every `tick`
  // seconds: what it notices, it notices so much later at the most.
  void set_grace(double seconds, double tick);

 private:
  struct Rank {
    const RankLiveness* liveness;
    RankLiveness::Clock::time_point seen;
    double processor_seconds;
    double silence;  // seconds
  };

  void run();
  bool is_silent(Rank& rank, double passed) const;

  const Rules rules_;
  std::vector<Rank> ranks_;
  std::atomic<bool> processor_counts_{true};
  std::atomic<double> grace_{0.0};
  std::mutex mutex_;
  std::condition_variable changed_;
  double tick_;
  bool ending_ = false;
  std::optional<Error> failure_;
  RankLiveness::Clock::time_point end_;  // of the process, once there is a failure
  std::thread thread_;                   // last: it uses all of the above
};

// Prints the error and leaves with its code, in bounded time even where standard output or error is stuck.
[[noreturn]] void end_with(const Error& error, const Watchdog::PrintError& print_error) noexcept;

// What a process prints goes out before it is ended.
void flush_output();

}  // namespace ringattn
