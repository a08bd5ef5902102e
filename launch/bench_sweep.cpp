// SPDX-License-Identifier: Apache-2.0
#include "launch/bench_sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/build.hpp"
#include "base/json_writer.hpp"
#include "launch/bench_table.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/message_text.hpp"
#include "launch/op_flags.hpp"
#include "launch/open_job.hpp"
#include "launch/progress.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSeed = 1;

std::string revision() { return fmt::format("{}{}", git_revision(), git_dirty() ? "-dirty" : ""); }

}  // namespace

std::vector<Setting> open_settings(const Config& config, Transport& world, const Collective& collective) {
  const JobOptions& options = config.options;
  collective.run_collectively([&] {
    if (config.chosen("batch") && config.given("total-tokens")) {
      fail(ErrorCode::kUsage,
           fmt::format("{} and {} are both given", config.origin("batch"), config.origin("total-tokens")),
           "each says how many sequences there are", "Leave one of them out.");
    }
    if (config.given("input") && config.given("total-tokens")) {
      fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("total-tokens"), config.origin("input")),
           "the file's header gives the shape", "Leave it out.");
    }
  });
  std::vector<std::int64_t> blocks = options.blocks;
  if (blocks.empty()) blocks.push_back(0);
  std::vector<Setting> settings;
  const auto add = [&](const Config& one) {
    const std::shared_ptr<OpJob> job = open_job(one, OpUse::kBench, world, collective);
    // Jobs that only read and write rows have no blocks.
    const BenchJob shown = job->bench_job(config.given("input") ? options.input : std::string());
    for (const std::int64_t block : shown.kind == BenchKind::kStream ? std::vector<std::int64_t>{0} : blocks) {
      settings.push_back({job, shown, block});
    }
  };
  if (config.given("input")) {
    add(config);
    return settings;
  }
  for (const std::int64_t batch : options.batches) {
    for (const std::int64_t seq : options.seq) {
      Config one = config;
      one.options.seq = {seq};
      one.options.synthetic = options.synthetic.value_or(kSeed);
      one.options.batch = options.total_tokens > 0
                              ? std::max<std::int64_t>(1, options.total_tokens / std::max<std::int64_t>(1, seq))
                              : batch;
      add(one);
    }
  }
  return settings;
}

BenchLines::BenchLines(const JobOptions& options) {
  if (options.bench_output == BenchOutput::kJsonl) stdout_flag_ = "--output jsonl";
  if (options.jsonl == "-") {
    stdout_flag_ = "--jsonl -";
  } else {
    path_ = options.jsonl;
  }
}

void BenchLines::write(const BenchPoint& point, std::span<const std::string> arguments) {
  JsonWriter json(false);
  write_point(json, point, arguments);
  const auto append = [&](std::FILE* file, std::string_view target) {
    if (file == nullptr || std::fprintf(file, "%s\n", json.text().c_str()) < 0 || std::fflush(file) != 0) {
      fail(ErrorCode::kFile, fmt::format("a line can't be written to {}", target), std::strerror(errno),
           "Write it to a disk with free space; the lines before it are complete.");
    }
  };
  if (!stdout_flag_.empty()) append(stdout, stdout_flag_);
  if (path_.empty()) return;
  if (!file_) file_.reset(std::fopen(path_.c_str(), "w"));
  append(file_.get(), fmt::format("--jsonl {}", path_));
}

Sweep::Sweep(const Invocation& invocation, Transport& world, const Screen& screen, BenchLines& lines)
    : invocation_(invocation),
      options_(invocation.config.options),
      world_(world),
      collective_(world, Timeouts(options_.timeout)),
      screen_(screen),
      lines_(lines) {}

void Sweep::measure(const Setting& setting, bool only) {
  try {
    measure_modes(setting);
    setting.opened->release();
  } catch (const AgreedError& error) {
    setting.opened->release();
    // Every rank throws this error.
    if (only || (error.code() != ErrorCode::kMemory && error.code() != ErrorCode::kUnsupported)) throw;
    BenchPoint point;
    point.job = setting.job;
    point.block = setting.block;
    point.world = world_.size();
    point.transport = world_.name();
    point.git = revision();
    point.mode = options_.compute_only ? kComputeMode : kWholeMode;
    point.error = program_text(error);
    if (!failure_) failure_ = error;
    screen_.context(fmt::format("{}: {}", setting.job.label(), point.error));
    keep(point);
  }
}

void Sweep::describe(const Setting& setting) {
  print_job(screen_, prepare(setting));
  setting.opened->release();
}

Report Sweep::prepare(const Setting& setting) {
  Options options = library_options(invocation_.config);
  options.block_tokens = setting.block;
  Report report;
  report.command = "bench";
  report.invocation = &invocation_;
  report.job = setting.opened;
  prepare_job(report, options, world_, collective_);
  return report;
}

void Sweep::measure_modes(const Setting& setting) {
  ProgressDisplay progress(options_, world_.rank() == 0);
  Report report = prepare(setting);
  if (points_.empty()) print_job(screen_, report);
  const MeasureRequest request{options_.samples, options_.compute_only, options_.against == "compute",
                               [&](std::string_view what, const StepCount& steps) { progress.update(what, steps); }};
  const Measured measured = report.job->measure(request, collective_);
  progress.clear();
  gather_figures(report, measured.figures, world_, collective_);
  for (const Measurement& mode : measured.modes) {
    BenchPoint point = point_of(setting, report, mode);
    point.digest = measured.digest;
    keep(point);
  }
}

BenchPoint Sweep::point_of(const Setting& setting, const Report& report, const Measurement& measurement) const {
  const Samples& samples = measurement.samples;
  BenchPoint point;
  point.git = revision();
  point.host = report.hosts.front();
  point.devices = report.devices;
  point.world = report.ranks;
  point.transport = report.transport;
  point.kernel = report.job->kernel().name;
  point.job = setting.job;
  point.layout = report.plan->layout;
  point.stripe = report.plan->stripe;
  point.block = setting.block;
  point.blocks = report.plan->blocks;
  point.overlap = options_.overlap;
  point.estimated_ms = report.plan->estimated_seconds.value_or(0.0) * 1e3;
  point.memory_peak = report.memory_peak();
  point.memory_planned = report.plan->memory_per_rank;
  point.samples = samples.count;
  point.ms = samples.ms;
  point.exposed_comm_ms = samples.exposed_comm_ms;
  if (measurement.compute_only) point.mode = kComputeMode;
  point.gb_per_s = samples.ms.per_second(measurement.bytes) * 1e-9;
  point.tflops_per_rank = samples.ms.per_second(report.job->flops()) / world_.size() * 1e-12;
  return point;
}

void Sweep::keep(const BenchPoint& point) {
  collective_.run_collectively([&] {
    if (world_.rank() == 0) lines_.write(point, invocation_.arguments);
  });
  points_.push_back(point);
}

}  // namespace ringattn
