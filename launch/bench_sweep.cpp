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
#include "launch/progress.hpp"
#include "launch/ssm_request.hpp"
#include "ops/common/attention_op_job.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/decode/decode_or_attend.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSeed = 1;

std::string revision() { return fmt::format("{}{}", git_revision(), git_dirty() ? "-dirty" : ""); }

Setting ssm_setting(SsmInput input, const std::string& source) {
  BenchJob job = bench_job(input, source);
  return {std::move(input), std::move(job), 0};
}

}  // namespace

std::unique_ptr<OpJob> Setting::open() const {
  if (is_ssm()) return std::make_unique<SsmOpJob>(ssm());
  return std::make_unique<AttentionOpJob>(input());
}

std::vector<Setting> settings_of(const Config& config, const TopKDevice& target) {
  const JobOptions& options = config.options;
  if (chosen(config, "batch") && config.given("total-tokens")) {
    fail(ErrorCode::kUsage,
         fmt::format("{} and {} are both given", config.origin("batch"), config.origin("total-tokens")),
         "each says how many sequences there are", "Leave one of them out.");
  }
  if (config.given("input") && config.given("total-tokens")) {
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("total-tokens"), config.origin("input")),
         "the file's header gives the shape", "Leave it out.");
  }
  std::vector<std::int64_t> blocks = options.blocks;
  if (blocks.empty()) blocks.push_back(0);
  std::vector<Setting> settings;
  const bool of_folds = options.against == "compute" || options.against == "sgemm";
  const auto add = [&](JobInput input, const std::string& source) {
    if (of_folds && input.makes_cache()) {
      input = input.attended(fmt::format("a decode step takes no --against {}", options.against));
    }
    for (const std::int64_t block : blocks) settings.push_back({input, bench_job(input, source), block});
  };
  const OpenedSource source = open_source(config, false);
  if (config.given("input") && source.ssm) {
    settings.push_back(ssm_setting(open_ssm(config), options.input));
    return settings;
  }
  if (config.given("input")) {
    add(open_input(config, true, target), options.input);
    return settings;
  }
  for (const std::int64_t batch : options.batches) {
    for (const std::int64_t seq : options.seq) {
      Config one = config;
      one.options.synthetic = options.synthetic.value_or(kSeed);
      one.options.batch = options.total_tokens > 0
                              ? std::max<std::int64_t>(1, options.total_tokens / std::max<std::int64_t>(1, seq))
                              : batch;
      if (source.ssm) {
        settings.push_back(ssm_setting(open_ssm(one, seq), ""));
      } else {
        add(decode_or_requested_rows({synthetic_input(one, seq), numerics_of(one), target}, one), "");
      }
    }
  }
  return settings;
}

void resolve_ops(std::vector<Setting>& settings, const Config& config, const Transport& world,
                 const Collective& collective) {
  const bool named = !config.given("input") && config.given("op");
  const KernelRequest request = compatible_request({config.options.backend, config.options.kernel}, world);
  for (Setting& setting : settings) {
    if (!setting.job.decode || (named && !setting.input().makes_cache())) continue;
    JobInput input = decode_or_attend(setting.input(), request, collective);
    if (!input.decodes()) setting.job = bench_job(input, setting.job.source);
    setting.source = std::move(input);
  }
}

void BenchLines::write(const BenchPoint& point, std::span<const std::string> arguments) {
  if (path_.empty()) return;
  if (path_ != "-" && !file_) file_.reset(std::fopen(path_.c_str(), "w"));
  std::FILE* file = path_ == "-" ? stdout : file_.get();
  JsonWriter json(false);
  write_point(json, point, arguments);
  if (file == nullptr || std::fprintf(file, "%s\n", json.text().c_str()) < 0 || std::fflush(file) != 0) {
    fail(ErrorCode::kFile, fmt::format("a line can't be written to --jsonl {}", path_), std::strerror(errno),
         "Write it to a disk with free space; the lines before it are complete.");
  }
}

Sweep::Sweep(const Invocation& invocation, Transport& world, const Screen& screen)
    : invocation_(invocation),
      options_(invocation.config.options),
      world_(world),
      collective_(world, Timeouts(options_.timeout)),
      screen_(screen),
      lines_(world.rank() == 0 ? options_.jsonl : "") {}

void Sweep::measure(const Setting& setting, bool only) {
  try {
    measure_modes(setting);
  } catch (const AgreedError& error) {
    // Every rank knows of it.
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
    screen_.context(fmt::format("{}: {}", label(setting.job), point.error));
    keep(point);
  }
}

void Sweep::describe(const Setting& setting) { print_job(screen_, prepare(setting)); }

Report Sweep::prepare(const Setting& setting) {
  Options options = library_options(invocation_.config);
  options.block_tokens = setting.block;
  Report report;
  report.command = "bench";
  report.invocation = &invocation_;
  report.job = setting.open();
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
  collective_.run_collectively([&] { lines_.write(point, invocation_.arguments); });
  points_.push_back(point);
}

}  // namespace ringattn
