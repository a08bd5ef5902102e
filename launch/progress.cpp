// SPDX-License-Identifier: Apache-2.0
#include "launch/progress.hpp"

#include <fmt/format.h>

#include <cstdio>

#include "launch/screen.hpp"

namespace ringattn {

ProgressDisplay::ProgressDisplay(const JobOptions& options, bool shown) {
  if (!shown || options.progress == When::kOff) {
    mode_ = Mode::kNone;
  } else if (options.progress == When::kOn) {
    mode_ = Mode::kEveryStep;
  } else if (options.quiet) {
    mode_ = Mode::kNone;
  } else {
    mode_ = is_watched(stderr) ? Mode::kTerminal : Mode::kEvery10Seconds;
  }
}

ProgressDisplay::~ProgressDisplay() { clear(); }

void ProgressDisplay::update(std::string_view what, const StepCount& steps) {
  if (mode_ == Mode::kNone) return;
  const Clock::time_point now = Clock::now();
  const bool begins = what != what_;
  if (begins) {
    what_ = what;
    start_ = steps.done == 0 ? now : updated_;
  }
  const double seconds = std::chrono::duration<double>(now - start_).count();
  if (begins) time_left_.begin(steps, seconds);
  updated_ = now;
  // A terminal's line is rewritten at most ten times a second.
  const auto pause = mode_ == Mode::kEvery10Seconds ? std::chrono::milliseconds(10000) : std::chrono::milliseconds(100);
  if (mode_ != Mode::kEveryStep && now - shown_ < pause) return;
  shown_ = now;
  const std::string text = progress_text(what, steps, seconds, time_left_.seconds_left(steps, seconds));
  const bool terminal = mode_ == Mode::kTerminal;
  std::fputs((terminal ? "\r\x1b[K" + text : "ringattn: " + text + "\n").c_str(), stderr);
  std::fflush(stderr);
  line_shown_ = terminal;
}

void ProgressDisplay::clear() {
  if (!line_shown_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  line_shown_ = false;
}

double TimeLeft::work_done(const StepCount& steps) {
  if (steps.done == 0) return 0.0;
  return steps.work.value_or(static_cast<double>(steps.done) / static_cast<double>(steps.all));
}

std::optional<double> TimeLeft::seconds_left(const StepCount& steps, double seconds) const {
  const double work = work_done(steps);
  if (steps.done >= steps.all || work <= begin_.work) return std::nullopt;
  return (seconds - begin_.seconds) * (1.0 - work) / (work - begin_.work);
}

std::string progress_text(std::string_view what, const StepCount& steps, double seconds, std::optional<double> left) {
  std::string text = fmt::format("{} {} of {}, {:.1f} s", what, steps.done, steps.all, seconds);
  if (left) text += fmt::format(", about {:.1f} s left", *left);
  return text;
}

}  // namespace ringattn
