// SPDX-License-Identifier: Apache-2.0
// A thread that watches the ranks of this process. It ends the process when a rank hangs in a call without a deadline
// (of MPI, a file system or a driver), or when the unwinding after a failure hangs.
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
    double seconds;  // limit without a heartbeat: after it a rank is silent
    // Called once, on the watchdog's thread, with the silent rank.
    std::function<void(const RankLiveness&)> silent;
    // Called on the watchdog's thread when a failure has not ended the watchdog within end_grace. Must not return.
    std::function<void(const Error&)> last_resort;
    // How long a failed rank may take to unwind, to tell the others and to exit.
    std::chrono::seconds end_grace{5};
  };

  // `ranks` must outlive the object. A rank is watched while its liveness is attached to a thread.
  Watchdog(std::vector<const RankLiveness*> ranks, Rules rules);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // The polling interval in seconds for a silence limit of `seconds`: long enough to cost nothing, short enough to be
  // precise.
  static double interval(double seconds);

  // From now on the process has end_grace to end by itself. Only the first call counts.
  void arm(const Error& error) noexcept;

  // Sets whether CPU time counts as progress. It does initially, for ranks that compute. MPI calls that wait for other
  // processes use CPU time too.
  void set_processor_counts(bool counts) { processor_counts_ = counts; }

  // From now on a rank is silent only `seconds` later than the rules say (initially 0), and the watchdog polls every
  // `tick` seconds, which bounds how late it notices something.
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
  RankLiveness::Clock::time_point end_;  // when the process is ended, once there is a failure
  std::thread thread_;                   // last, because it uses all of the above
};

// Prints the error and exits with its code, in bounded time even if standard output or error blocks.
[[noreturn]] void end_with(const Error& error, const Watchdog::PrintError& print_error) noexcept;

// Flushes standard output and error before the process is ended.
void flush_output();

}  // namespace ringattn
