// SPDX-License-Identifier: Apache-2.0
// `ringattn bench`: a sweep, its tables, and comparisons with other measurements.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "launch/bench_output.hpp"
#include "launch/bench_points.hpp"
#include "launch/bench_quick.hpp"
#include "launch/bench_sweep.hpp"
#include "launch/bench_table.hpp"
#include "launch/commands.hpp"
#include "launch/job_request.hpp"
#include "launch/message_text.hpp"
#include "launch/op_flags.hpp"
#include "launch/outputs.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/sgemm.hpp"
#include "ops/jobs/samples.hpp"

namespace ringattn {

namespace {

// Files to compare with. They are read before anything is measured, so that a file without such a job is refused early.
struct Yardsticks {
  std::vector<BenchPoint> against;
  std::vector<BenchPoint> baseline;
};

std::vector<BenchPoint> read_comparable(const std::string& path, std::string_view flag,
                                        const std::vector<Setting>& settings, int world) {
  std::vector<BenchPoint> points = read_points(path, flag);
  const bool any = std::any_of(points.begin(), points.end(), [&](const BenchPoint& point) {
    return point.measured() && point.world == world &&
           std::any_of(settings.begin(), settings.end(),
                       [&](const Setting& setting) { return setting.job == point.job; });
  });
  if (!any) {
    fail(ErrorCode::kFile, fmt::format("{} has no point to compare with", path),
         fmt::format("none is a job of this sweep on {} rank{}", world, world == 1 ? "" : "s"),
         fmt::format("Its first point is: {}; {} rank{}.", points.front().job.label(), points.front().world,
                     points.front().world == 1 ? "" : "s"));
  }
  return points;
}

bool is_file(const JobOptions& options) {
  return !options.against.empty() && options.against != "compute" && options.against != "sgemm";
}

Yardsticks read_yardsticks(const JobOptions& options, const std::vector<Setting>& settings, int world) {
  Yardsticks yardsticks;
  if (is_file(options)) yardsticks.against = read_comparable(options.against, "--against", settings, world);
  if (!options.baseline.empty()) {
    yardsticks.baseline = read_comparable(options.baseline, "--baseline", settings, world);
  }
  return yardsticks;
}

// Prints each point that is slower than the gate allows, and each point of the baseline that this run lacks. Returns
// the exit code.
int check_baseline(const Screen& screen, const JobOptions& options, std::span<const BenchPoint> points,
                   std::span<const BenchPoint> baseline) {
  const std::vector<PointPair> pairs = pair_with_baseline(points, baseline);
  int slower = 0;
  for (const auto& [ours, theirs] : pairs) {
    if (ours.devices.front() != theirs.devices.front()) {
      fail(ErrorCode::kUnsupported, fmt::format("{} was measured on another machine", options.baseline),
           fmt::format("{} there, {} here", theirs.devices.front(), ours.devices.front()),
           "Record a baseline here with --jsonl.");
    }
    const double excess = ours.ms.median / theirs.ms.median - 1.0;
    const std::string text = fmt::format("{}: {:.3f} ms, baseline {:.3f} ms ({:+.1f} %)", ours.job.label(),
                                         ours.ms.median, theirs.ms.median, 100.0 * excess);
    if (excess > options.fail_above) {
      ++slower;
      screen.print(fmt::format("{} {}\n", screen.painted("slower:", Paint::kBad), text));
    } else {
      screen.detail(text);
    }
  }
  int missing = 0;
  for (const BenchPoint& point : points) {
    const auto had = [&](const BenchPoint& other) {
      return other.measured() && other.job == point.job && other.world == point.world && other.block == point.block &&
             other.mode == point.mode;
    };
    if (point.measured() || std::none_of(baseline.begin(), baseline.end(), had)) continue;
    ++missing;
    screen.print(fmt::format("{} {}, which the baseline has\n", screen.painted("not measured:", Paint::kBad),
                             point.job.label()));
  }
  if (pairs.empty() && missing == 0) {
    fail(ErrorCode::kFile, fmt::format("{} has no point to compare with", options.baseline),
         "the jobs are there, but with another kernel, transport, layout, block size or mode",
         "Give the flags that it was recorded with.");
  }
  const double percent = 100.0 * options.fail_above;
  if (slower + missing > 0) {
    screen.print(fmt::format("{}: {} of {} point{} slower than the baseline by more than {:g} %{}\n",
                             screen.painted("FAIL", Paint::kBad), slower, pairs.size(), pairs.size() == 1 ? "" : "s",
                             percent, missing == 0 ? "" : fmt::format(", {} not measured", missing)));
    return static_cast<int>(ErrorCode::kWrongResult);
  }
  screen.print(fmt::format("{}: {} point{}, none slower than the baseline by more than {:g} %\n",
                           screen.painted("PASS", Paint::kGood), pairs.size(), pairs.size() == 1 ? "" : "s", percent));
  return 0;
}

// Every rank measures at the same time, with as many threads as the kernels of the job. The slowest rank counts.
SgemmRate sgemm_of(const Config& config, OpJob& job, Transport& world) {
  const Collective collective(world, Timeouts(config.options.timeout));
  job.prepare(world, library_options(config));
  SgemmRate rate;
  collective.run_collectively([&] {
    if (job.backend().memory() == MemoryKind::kDevice) {
      fail(ErrorCode::kUnsupported, "--against sgemm has no meaning on a GPU", "it measures the BLAS of the CPU",
           "Compare with lines of bench/peers, or add --backend cpu.");
    }
    rate = measure_sgemm(job.threads());
  });
  job.release();
  rate.flops_per_second = 1.0 / slowest(collective, {1.0 / rate.flops_per_second}).front();
  return rate;
}

int bench_job_list(const Invocation& invocation, Transport& world, Report&) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  if (options.quick) return bench_quick(invocation, world);
  const Collective collective(world, Timeouts(options.timeout));
  const bool first = world.rank() == 0;
  const Screen screen(options, first);

  std::vector<Setting> settings;
  Yardsticks yardsticks;
  collective.run_collectively([&] {
    check_one_stdout(config);
    if (config.chosen("fail-above") && options.baseline.empty()) {
      fail(ErrorCode::kUsage, fmt::format("{} needs --baseline", config.origin("fail-above")),
           "it says how much slower a point may be", "Add --baseline FILE.");
    }
    if (options.compute_only && options.against == "compute") {
      fail(ErrorCode::kUsage, "--compute-only and --against compute are both given",
           "there would be no whole run to compare with", "Leave one of them out.");
    }
  });
  settings = open_settings(config, world, collective);
  collective.run_collectively([&] {
    const BenchKind kind = settings.front().job.kind;
    if (kind != BenchKind::kRing && (options.against == "compute" || options.against == "sgemm")) {
      fail(ErrorCode::kUsage,
           fmt::format("--against {} is not for {}", options.against,
                       kind == BenchKind::kStep ? "a decode step" : "--op " + settings.front().job.op),
           "it is for jobs that send K/V blocks around the ring", "Give --against FILE, a file of measured lines.");
    }
    library_options(config);  // throws if they are invalid
    if (first) {
      check_outputs(invocation);
      yardsticks = read_yardsticks(options, settings, world.size());
    }
  });
  for (const MessageTemplate& note : settings.front().opened->notes()) screen.context(program_text(note));
  BenchLines lines(options);
  Sweep sweep(invocation, world, screen, lines);
  if (options.dry_run) {
    for (const Setting& setting : settings) sweep.describe(setting);
    screen.context("dry run: nothing is measured");
    return 0;
  }
  std::optional<SgemmRate> sgemm;
  if (options.against == "sgemm") sgemm = sgemm_of(config, *settings.front().opened, world);
  for (const Setting& setting : settings) sweep.measure(setting, settings.size() == 1);

  const std::vector<BenchPoint>& points = sweep.points();
  if (std::none_of(points.begin(), points.end(), [](const BenchPoint& point) { return point.measured(); })) {
    throw AgreedError(*sweep.failure());
  }
  int code = 0;
  collective.run_collectively([&] {
    if (!first) return;
    write_table(screen, options, points_table(points, sgemm ? std::optional(sgemm->flops_per_second) : std::nullopt));
    if (sgemm) screen.context(fmt::format("SGEMM: {:.1f} GFLOP/s ({})", sgemm->flops_per_second / 1e9, sgemm->library));
    const std::vector<PointPair> pairs = pair_points(points, yardsticks.against);
    if (!pairs.empty()) screen.print(pairs_text(pairs));
    if (!yardsticks.baseline.empty()) code = check_baseline(screen, options, points, yardsticks.baseline);
    write_bench_report(invocation, points, pairs, sgemm ? std::optional(sgemm->flops_per_second) : std::nullopt, code);
  });
  return collective.gather_values(code).front();
}

}  // namespace

int bench_main(const Invocation& invocation, Transport* world) {
  return run_reported("bench", invocation, *world,
                      [&](Report& report) { return bench_job_list(invocation, *world, report); });
}

}  // namespace ringattn
