// SPDX-License-Identifier: Apache-2.0
// Progress on stderr: one line that is rewritten on a terminal, else a line every 10 s.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "attention/ring/engine.hpp"
#include "launch/options.hpp"

namespace ringattn {

// The time left for counted steps, in proportion to the remaining work: StepCount::work, or steps. The rate is measured
// from the first count. Time before it (enqueueing, waiting for other ranks) is not in proportion to the work of the
// first steps, which may be a millionth of the total.
class TimeLeft {
 public:
  void begin(const StepCount& steps, double seconds) { begin_ = {seconds, work_done(steps)}; }
  // Returns nothing at the first count and once all steps are done.
  std::optional<double> seconds_left(const StepCount& steps, double seconds) const;

 private:
  struct Count {
    double seconds = 0.0;
    double work = 0.0;
  };
  static double work_done(const StepCount& steps);

  Count begin_;
};

class ProgressDisplay {
 public:
  // `shown`: false on all ranks but one.
  ProgressDisplay(const JobOptions& options, bool shown);
  ~ProgressDisplay();
  ProgressDisplay(const ProgressDisplay&) = delete;
  ProgressDisplay& operator=(const ProgressDisplay&) = delete;

  // Shows `steps` of `what` ("block"). The time shown counts from the end of the previous `what`, or from an update
  // with nothing done.
  void update(std::string_view what, const StepCount& steps);
  // Removes the line from a terminal.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Mode { kNone, kTerminal, kEvery10Seconds, kEveryStep };

  Mode mode_;
  bool line_shown_ = false;
  std::string what_;
  TimeLeft time_left_;
  Clock::time_point start_ = Clock::now();  // of what_
  Clock::time_point updated_ = start_;      // the last update
  Clock::time_point shown_ = start_;        // the last update that was shown
};

// "block 3 of 12, 4.1 s, about 12.3 s left"
std::string progress_text(std::string_view what, const StepCount& steps, double seconds, std::optional<double> left);

}  // namespace ringattn
