// SPDX-License-Identifier: Apache-2.0
// The points of a sweep: which points are measured, and which of their figures are kept.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"
#include "launch/bench_points.hpp"
#include "launch/commands.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "ops/jobs/samples.hpp"

namespace ringattn {

// A point to be measured. Points of one input share its job.
struct Setting {
  std::shared_ptr<OpJob> opened;
  BenchJob job;
  std::int64_t block = 0;  // tokens; 0: the plan's choice
};

// Lengths × block sizes, or the file of --input × block sizes. If decode was chosen only by the file's tensors or by a
// default, and no kernel decodes the cache or the latents in rows, the job is measured as attention. Collective. Throws
// kUsage and kFile.
std::vector<Setting> open_settings(const Config& config, Transport& world, const Collective& collective);

// The lines of --jsonl and of --output jsonl. Each is written at once, so a sweep that is interrupted leaves the points
// that it has measured.
class BenchLines {
 public:
  // The first line opens the file.
  explicit BenchLines(const JobOptions& options);
  // Throws kFile.
  void write(const BenchPoint& point, std::span<const std::string> arguments);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string_view stdout_flag_;  // the flag whose lines go to stdout; empty: none
  std::string path_;              // empty: no file
  std::unique_ptr<std::FILE, Close> file_;
};

// All members are collective.
class Sweep {
 public:
  // `lines`: where rank 0 writes its points.
  Sweep(const Invocation& invocation, Transport& world, const Screen& screen, BenchLines& lines);

  // `only`: there is no other point, so the command fails with it. Otherwise a job that doesn't fit is a result of the
  // sweep.
  void measure(const Setting& setting, bool only);
  // Plans the point and prints what would be measured.
  void describe(const Setting& setting);
  const std::vector<BenchPoint>& points() const { return points_; }
  // The failure of the first point that can't be measured.
  const std::optional<AgreedError>& failure() const { return failure_; }

 private:
  // The prepared job of the point.
  Report prepare(const Setting& setting);
  void measure_modes(const Setting& setting);
  BenchPoint point_of(const Setting& setting, const Report& report, const Measurement& measurement) const;
  void keep(const BenchPoint& point);

  const Invocation& invocation_;
  const JobOptions& options_;
  Transport& world_;
  Collective collective_;
  const Screen& screen_;
  BenchLines& lines_;
  std::vector<BenchPoint> points_;
  std::optional<AgreedError> failure_;
};

}  // namespace ringattn
